"""Find the cheapest changes that make a plan fit. Each candidate is planned to see if it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvcli.errors import KvcliError
from kvcli.fit.available_memory import AvailableMemory, choose
from kvcli.fit.plan import MeasuredFacts, Plan, PlannedModel, plan_on
from kvcli.fit.run_log import NOTHING
from kvcli.settings.profile import Profile
from kvcli.settings.values import BY

MIB = 1 << 20
MOST = 3
ROUND = 1024  # long suggested contexts are rounded down to a multiple of this many tokens
SMALL = 256  # rows per pass above which matrix products gain no more speed (docs/measurements/lab-log.md)


@dataclass(frozen=True, slots=True)
class Change:
    """One change for the user to type, and the memory that the plan needs with it."""

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
    """Return at most three changes, those that change the output least first."""
    found: list[Change] = []
    shorter: list[Change] = []  # changes that fit only with a shorter context
    for words, profile, room, context in _candidates(wrong, others, rooms):
        # the excess that was measured on another device does not apply
        known = facts if room.kind == wrong.room.kind else replace(facts, beyond=NOTHING)
        try:
            tried = plan_on(subject, profile(), room, context, known)
        except KvcliError:  # the profile cannot have the change: an exact profile cannot quantize keys, for example
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
    """Yield the words to type, a function that builds the profile, the memory and the context, cheapest first."""
    profile, room, context = wrong.profile, wrong.room, wrong.need.context
    if wrong.need.short and wrong.run.spends is not None:
        # twice the protected tokens, as the policy does (methods/policies/precision/policy.py)
        size = f"{-(-2 * wrong.run.always * wrong.run.spends.of_token // MIB)}MiB"
        flag = "--budget " if profile.origins["memory.budget"] == "--budget" else "--set memory.budget="
        yield f"{flag}{size}", lambda: profile.replace(memory={"budget": size}), room, context
    if "spec" in profile.second_models:
        words = "--spec ngram in place of --draft" if profile.origins["spec.model"] == "--draft" else "--spec ngram"
        yield words, lambda: profile.replace(spec={"method": "ngram"}), room, context
    if profile.prefill.chunk > SMALL:  # prefill gets a little slower, nothing else changes
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
            # what the plan changed for its device is as it was before
            planned = [key[5:] for key, by in profile.origins.items() if by == BY and key.startswith("load.")]
            asked = profile.replace(load={name: getattr(type(profile.load), name) for name in planned})
            yield f"--device {kind}", lambda asked=asked: asked, choose(dict(rooms), kind), context


def binding(wrong: Plan) -> str:
    """Name in words the component that the plan fails on."""
    parts = wrong.need
    if wrong.need.context > wrong.limit:
        return "the model's context limit"
    if wrong.need.short and wrong.fits_card:
        return "memory.budget, which is smaller than the protected tokens"
    if wrong.need.loading - wrong.need.mapped > wrong.need.running:
        return "loading, while weights are converted"
    if parts.base > wrong.usable:
        return "the runtime"
    if parts.base + parts.weights > wrong.usable:
        return "weights"
    if parts.over and wrong.run.on_card is not None:
        return "host memory, which holds the layers that do not fit on the GPU"
    if parts.over:
        return "the limits of memory.device, host and disk on the KV cache"
    sizes = {"KV cache": parts.kv, "draft model": parts.draft, "activations": parts.working}
    return max(sizes, key=lambda name: sizes[name])
