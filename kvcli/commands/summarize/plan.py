"""`kvcli summarize --dry-run`: the plan of a summary. The tokenizer is loaded, the weights are not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvcli.render.terminal.terminal import Terminal

if TYPE_CHECKING:
    from kvcli.commands.common.load_model import MemoryWishes
    from kvcli.commands.common.run_setup import Setup
    from kvcli.commands.summarize.documents import InputDocument
    from kvcli.commands.summarize.job import SummaryJob
    from kvcli.fit.plan import Plan as Fitted
    from kvcli.fit.preflight import Preflight
    from kvcli.schemas.fit import PassTime
    from kvcli.settings.profile import Profile
    from kvcli.summarize.plan import Plan, PlanWindow
    from kvcli.summarize.wording import Wording


def print_plans(job: SummaryJob) -> None:
    """Print a plan for each group of documents that would become one summary."""
    from kvcli.summarize.plan import make_plan

    window, wording = look(job.setup, job.profile, job.wanted)
    wording.refuse(job.request, job.setup.name)
    for given in job.groups:
        with job.attempt(given):
            plan = make_plan([one.document for one in given], job.request, window, wording, job.read)
            if job.out.form == "json":
                from kvcli.commands.summarize.documents import facts
                from kvcli.summarize.document import plan_document

                job.out.json(plan_document(plan, facts(given, window.tokenizer)))
            else:
                _print(job, given, plan, window)


def look(setup: Setup, profile: Profile, wanted: MemoryWishes) -> tuple[PlanWindow, Wording]:
    """Return the facts about the model that a plan needs, from its files."""
    from kvcli.commands.common.load_model import outlook_of
    from kvcli.commands.common.run_setup import refuse_beyond
    from kvcli.commands.fit import others_of
    from kvcli.engine.loading.weights import keeps_quantized
    from kvcli.models.gguf.convert import convert_if_needed
    from kvcli.models.tokenizer import load_tokenizer
    from kvcli.summarize.plan import PlanWindow, most_of
    from kvcli.summarize.wording import wording_of

    setup.world.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    found = setup.fetch(profile)
    outlook = outlook_of(setup, found)
    refuse_beyond(profile, outlook.subject.shape.limit, setup.name)
    fitted, note = outlook.fitted(profile, lambda: others_of(setup), force=wanted.force, whole=wanted.whole)
    profile = fitted.profile
    packs = keeps_quantized(profile.load)
    found = convert_if_needed(found, profile.load.dtype, setup.world.paths.cache, packs=packs)
    tokenizer = load_tokenizer(found, profile.load.trust_remote_code)
    most = outlook.subject.shape.limit
    asked = profile.context.limit
    limit = fitted.need.context if note else most if asked == "auto" else min(int(asked), most)
    passes = _passes(setup, outlook, fitted)
    foretell, drafts = partial(outlook.estimate_peak, profile), profile.spec.method != "off"
    window = PlanWindow(tokenizer, limit, most_of(profile), passes, foretell, reach=most, drafts=drafts)
    return window, wording_of(found)


def _passes(setup: Setup, outlook: Preflight, fitted: Fitted) -> list[PassTime]:
    """Return pass times measured by `kvcli bench --calibrate` or by an earlier run."""
    from kvcli.fit.calibrate import fingerprint_in, known_times
    from kvcli.fit.run_log import machine_fingerprint

    cache, machine = setup.world.paths.cache, machine_fingerprint(fitted.room.device, fitted.profile.load.threads)
    key = fingerprint_in(fitted, outlook.subject, setup.name, cache)
    return known_times(cache, machine, key, outlook.notes.append) or []


def plan_words(
    job: SummaryJob, given: Sequence[InputDocument], plan: Plan, window: PlanWindow, width: int
) -> list[str]:
    """Return the files and the plan as lines."""
    from kvcli.render.summarize.notes import about_file, hung, plan_lines

    named = zip(given, job.names(given), strict=True)
    sources = [about_file(name, one.document, one.document.tokens(window.tokenizer)) for one, name in named]
    return [*(line for words in sources for line in hung(words, width)), *plan_lines(plan, width)]


def _print(job: SummaryJob, given: Sequence[InputDocument], plan: Plan, window: PlanWindow) -> None:
    from kvcli.render.summarize.notes import stretch

    out = Terminal.of(job.setup.world, "stdout")
    for line in plan_words(job, given, plan, window, out.width):
        out.line((line, ""))
    if len(plan.parts) > 1:
        for part, prompt in zip(plan.parts, plan.prompts, strict=True):
            out.line((f"  part {part.number} · {stretch(part)} · {prompt:,} tokens", ""))
    out.line((f"  answer length up to {plan.answer:,} tokens · context window {plan.limit:,}", ""))
