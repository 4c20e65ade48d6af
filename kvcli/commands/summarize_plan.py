"""`kvcli summarize --dry-run`: how a summary would be made. The tokenizer is loaded, the weights are not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvcli.commands.show import print_json
from kvcli.render.terminal import Terminal

if TYPE_CHECKING:
    from kvcli.commands.outlook import Wanted
    from kvcli.commands.setup import Setup
    from kvcli.commands.summarize_read import Given
    from kvcli.fit.before import Outlook
    from kvcli.fit.plan import Plan as Fitted
    from kvcli.profile import Profile
    from kvcli.schemas.fit import PassTime
    from kvcli.summarize.plan import Plan, Window
    from kvcli.summarize.prompt import Wording
    from kvcli.summarize.request import Request


def print_plans(
    setup: Setup, profile: Profile, shelves: Sequence[Sequence[Given]], request: Request, wanted: Wanted, *, json: bool
) -> None:
    """A plan for each group of documents that would become one summary."""
    from kvcli.summarize.plan import make_plan

    window, wording = look(setup, profile, wanted)
    wording.refuse(request, setup.name)
    for given in shelves:
        plan = make_plan([one.document for one in given], request, window, wording)
        if json:
            from kvcli.commands.summarize_read import facts
            from kvcli.schemas.summary import plan_document

            print_json(setup.world, plan_document(plan, facts(given, window.tokenizer)))
        else:
            _print(setup, given, plan, window)


def look(setup: Setup, profile: Profile, wanted: Wanted) -> tuple[Window, Wording]:
    """What a plan must know of the model, from its files."""
    from kvcli.commands.fit import others_of
    from kvcli.commands.models import find
    from kvcli.commands.setup import refuse_beyond
    from kvcli.fit.before import Outlook
    from kvcli.fit.plan import subject_of
    from kvcli.summarize.plan import Window, most_of
    from kvcli.summarize.prompt import wording_of
    from kvcli.tokenizer import load_tokenizer

    world = setup.world
    world.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    found = find(world, setup.name, profile.load.allow_pickle)
    outlook = Outlook(subject_of(found), setup.name, world.paths.cache, world.paths.data)
    refuse_beyond(profile, outlook.subject.shape.limit, setup.name)
    fitted, note = outlook.fitted(profile, lambda: others_of(setup), force=wanted.force, whole=wanted.whole)
    tokenizer = load_tokenizer(found, profile.load.trust_remote_code)
    most = outlook.subject.shape.limit
    asked = profile.context.limit
    limit = fitted.need.context if note else most if asked == "auto" else min(int(asked), most)
    passes = _passes(setup, outlook, fitted)
    window = Window(tokenizer, limit, most_of(profile), passes, partial(outlook.foretell, profile))
    return window, wording_of(found.path)


def _passes(setup: Setup, outlook: Outlook, fitted: Fitted) -> list[PassTime]:
    """What was measured before, by `kvcli bench --calibrate` or by an earlier run."""
    from kvcli.calibrate import load_calibration
    from kvcli.calibrate.quick import kept_times
    from kvcli.calibrate.run import model_fingerprint
    from kvcli.calibrate.store import machine_fingerprint
    from kvcli.fit.plan import torch_dtype

    shape, load, cache = outlook.subject.shape, fitted.profile.load, setup.world.paths.cache
    machine = machine_fingerprint(fitted.room.device, load.threads)
    dtype = torch_dtype(outlook.subject, fitted.profile)
    key = model_fingerprint(dtype, load.quant, shape.layers, shape.hidden, shape.vocab, setup.name)
    known = load_calibration(cache, machine, key, outlook.notes.append)
    if known is not None and known.model is not None and known.model.passes:
        return list(known.model.passes)
    return kept_times(cache, machine, key)


def _print(setup: Setup, given: Sequence[Given], plan: Plan, window: Window) -> None:
    from kvcli.render.summarize import about_file, hung, plan_lines, stretch

    out = Terminal.of(setup.world, "stdout")
    sources = [about_file(one.document, one.document.tokens(window.tokenizer)) for one in given]
    for line in [*(line for words in sources for line in hung(words, out.width)), *plan_lines(plan, out.width)]:
        out.line((line, ""))
    if len(plan.parts) > 1:
        for part, prompt in zip(plan.parts, plan.prompts, strict=True):
            out.line((f"  part {part.number} · {stretch(part)} · {prompt:,} tokens", ""))
    out.line((f"  answers of at most {plan.answer:,} tokens · window {plan.limit:,}", ""))
