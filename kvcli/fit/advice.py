"""The cheapest changes that make a plan fit, found by planning each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcli.errors import KvcliError
from kvcli.fit.auto_placement import plan_on
from kvcli.fit.available_memory import choose
from kvcli.fit.plan import MeasuredFacts, Plan, PlannedModel
from kvcli.fit.run_log import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvcli.fit.available_memory import AvailableMemory
    from kvcli.settings.profile import Profile

MIB = 1 << 20
MOST = 3
ROUND = 1024  # a suggested context is a multiple of this many tokens where it is that long
SMALL = 256  # rows from which products gain nothing more from being larger (docs/lab-log.md)


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to type, and what the plan needs then."""

    type: str
    total: int
    context: int


def changes(
    subject: PlannedModel,
    wrong: Plan,
    others: Mapping[str, Profile],
    rooms: Mapping[str, AvailableMemory],
    facts: MeasuredFacts,
) -> list[Change]:
    """At most three, those that change the text least first."""
    found: list[Change] = []
    shorter: list[Change] = []  # with a shorter context on top
    for words, profile, room, context in _candidates(wrong, others, rooms):
        # what runs took on another device says nothing
        known = facts if room.kind == wrong.room.kind else replace(facts, beyond=NOTHING)
        try:
            tried = plan_on(subject, profile(), room, context, known)
        except KvcliError:  # a profile that cannot have it, as one that promises exact text cannot round its keys
            continue
        if tried.fits:
            found.append(Change(words, tried.total, tried.need.context))
        elif wrong.most < (most := _round(tried.most)) < context:
            tried = plan_on(subject, profile(), room, most, known)
            shorter.append(Change(f"{words} --ctx {most}", tried.total, most))
        if len(found) == MOST:
            break
    return [*found, *shorter][:MOST]


def _round(context: int) -> int:
    return context // ROUND * ROUND or context


def _candidates(
    wrong: Plan, others: Mapping[str, Profile], rooms: Mapping[str, AvailableMemory]
) -> Iterator[tuple[Any, ...]]:
    """What to type, the profile then, the room, the context; in the order of what they cost the user."""
    profile, room, context = wrong.profile, wrong.room, wrong.need.context
    if wrong.need.short and wrong.run.spends is not None:
        # twice what always stays, as the policy says (methods/policies/precision/policy.py)
        size = f"{-(-2 * wrong.run.always * wrong.run.spends.of_token // MIB)}MiB"
        flag = "--budget " if profile.origins["memory.budget"] == "--budget" else "--set memory.budget="
        yield f"{flag}{size}", lambda: profile.replace(memory={"budget": size}), room, context
    if profile.spec.second is not None:
        words = "--spec ngram in place of --draft" if profile.origins["spec.model"] == "--draft" else "--spec ngram"
        yield words, lambda: profile.replace(spec={"method": "ngram"}), room, context
    if profile.prefill.chunk > SMALL:  # reads a little slower, changes nothing else
        yield f"--set prefill.chunk={SMALL}", lambda: profile.replace(prefill={"chunk": SMALL}), room, context
    if wrong.run.number > 2:
        yield "--dtype bf16", lambda: profile.replace(load={"dtype": "bf16"}), room, context
    can_pack = profile.load.quant == "none" and room.kind in ("cpu", "cuda")
    if can_pack:
        yield "--quant int8", lambda: profile.replace(load={"quant": "int8"}), room, context
    if most := min(wrong.most, wrong.limit):
        yield f"--ctx {_round(most)}", lambda: profile, room, _round(most)
    for name, other in others.items():
        if name != profile.name:
            yield f"-P {name}", lambda o=other: o, room, context
    if can_pack:
        yield "--quant int4", lambda: profile.replace(load={"quant": "int4"}), room, context
    for kind in rooms:
        if kind != room.device:
            yield f"--device {kind}", lambda: profile, choose(dict(rooms), kind), context


def binding(wrong: Plan) -> str:
    """In words, what the plan fails on."""
    parts = wrong.need
    if wrong.need.context > wrong.limit:
        return "the model's own limit"
    if wrong.need.short and wrong.fits_card:
        return "memory.budget, which has no room for what always stays"
    if wrong.need.loading - wrong.need.mapped > wrong.need.running:
        return "loading, while numbers are converted"
    if parts.base > wrong.usable:
        return "the program itself"
    if parts.base + parts.weights > wrong.usable:
        return "weights"
    if parts.over and wrong.run.on_card is not None:
        return "host memory, in which layers lie that the card has no room for"
    if parts.over:
        return "the room that memory.device, host and disk leave to keys and values"
    sizes = {"keys and values": parts.kv, "what drafts": parts.draft, "working memory": parts.working}
    return max(sizes, key=lambda name: sizes[name])
