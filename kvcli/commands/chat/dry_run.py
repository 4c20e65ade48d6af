"""`kvcli chat --dry-run`: the settings of a run and the memory it needs, with nothing loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcli.commands.common.load_model import outlook_of
from kvcli.commands.common.output import print_json, print_table
from kvcli.commands.common.run_setup import Setup, refuse_beyond
from kvcli.commands.models.command import kind_of, look_at
from kvcli.errors import ExitStatus, KvcliError
from kvcli.models.sampling import stated_sampling
from kvcli.render.terminal.terminal import ORDERS, count, long_size
from kvcli.schemas.listings import PlanDocument

if TYPE_CHECKING:
    from kvcli.documents import Document
    from kvcli.fit.plan import Plan
    from kvcli.models.source import Source
    from kvcli.settings.profile import Profile


def print_plan(setup: Setup, profile: Profile, documents: Sequence[Document]) -> int:
    """Print the plan in words, or as `kvcli.plan/1`."""
    document = plan(setup, profile, documents)
    if setup.world.options.json:
        print_json(setup.world, document)
        return ExitStatus.OK
    out = setup.world.stdout
    model = document.model
    out.write(f"model    {model.name}, {model.family}, {long_size(model.bytes or 0)} of weights, {model.dtype}\n")
    out.write(f"         {model.path}\n")
    out.write(f"context  {count(document.context or 0)} tokens, {long_size(document.kv_bytes or 0)} KV when full\n")
    if document.estimate_bytes is not None and document.available_bytes is not None:
        room = f"{long_size(document.available_bytes)} available"
        fits = "" if document.fits else f": does not fit, see kvcli fit {model.name}"
        out.write(f"memory   up to {long_size(document.estimate_bytes)}, {room}{fits}\n")
    if document.order is not None:
        out.write(f"prefill  {ORDERS[document.order]}\n")
    for file in document.documents:
        out.write(f"file     {file['name']}, {count(file['lines'])} lines, {count(file['characters'])} characters\n")
    out.write(f"profile  {document.profile}, {document.exactness}, hash {document.profile_hash}\n\n")
    rows = [[key, _shown(value), document.origins[key]] for key, value in document.settings.items()]
    print_table(setup.world, [["key", "value", "from"], *rows])
    return ExitStatus.OK


def plan(setup: Setup, profile: Profile, documents: Sequence[Document]) -> PlanDocument:
    """Return the plan, from documents and settings only."""
    world = setup.world
    entry = look_at(world, setup.name, kind_of(world, setup.name), profile.load.allow_pickle, strict=True)
    found = setup.fetch(profile)
    refuse_beyond(profile, entry.context or 0, setup.name)
    context = (entry.context or 0) if profile.context.limit == "auto" else int(profile.context.limit)
    needs = _needs(setup, profile, found, context)
    kv = needs.need.kv + needs.need.host + needs.need.disk if needs else 0
    profile = needs.profile if needs else profile
    sampling, origin = stated_sampling(found)
    followed = {key: sampling[name] for name in sampling if profile.values[key := f"sample.{name}"] is None}
    return PlanDocument(
        model=entry,
        profile=profile.name,
        profile_hash=profile.hash,
        exactness=profile.exactness,
        context=context or None,
        kv_bytes=kv or None,
        estimate_bytes=needs.total if needs else None,
        available_bytes=needs.room.available if needs else None,
        fits=needs.fits if needs else None,
        order=needs.run.order if needs else None,
        documents=[
            {"name": d.name, "sha256": d.sha256, "lines": d.lines, "characters": len(d.text)} for d in documents
        ],
        notes=world.file_notes,
        settings=profile.values | followed,
        origins=profile.origins | dict.fromkeys(followed, origin),
    )


def _needs(setup: Setup, profile: Profile, found: Source, context: int) -> Plan | None:
    """Return the estimate of `kvcli fit` for a full context window; None if the config does not give the sizes."""
    try:
        return outlook_of(setup, found).plan(profile, context or None)
    except KvcliError:
        return None


def _shown(value: object) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
