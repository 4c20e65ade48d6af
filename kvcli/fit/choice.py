"""What gives way where a GPU has no room for a model: bits of its weights, then layers, which the CPU runs.

Only what nobody said. The last layers stay on the card, with the head: a pass then crosses once, upwards and without
waiting, and the tokens that it draws are made where logits are. First of what goes are the embeddings, of which a pass
reads a few rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.fit.plan import Facts, Plan, Subject, plan
from kvcli.kv.footprint import is_ladder
from kvcli.settings.settings import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvcli.fit.room import Room
    from kvcli.settings.profile import Profile

BY = "what fits"  # where a setting came from
WINDOW = 8192  # tokens that a split is made for where no window is asked for


def plan_on(subject: Subject, profile: Profile, room: Room, context: int | None, facts: Facts) -> Plan:
    """As `plan`, but on a GPU with what fits, where the profile leaves it open; `plan.profile` says what that is.

    The last that was tried where nothing fits.
    """
    found = plan(subject, profile, room, context, facts)
    if room.kind != "cuda" or _is_enough(found, context):
        return found
    for other in _packed(subject, profile):
        profile, found = other, plan(subject, other, room, context, facts)
    if _is_enough(found, context) or profile.load.layers_on_gpu != "auto" or subject.is_quantized:
        return found
    return _split(subject, profile, room, context, facts) or found


def chosen(profile: Profile) -> Mapping[str, object]:
    """Dotted key -> what a plan chose."""
    return {key: profile.values[key] for key, origin in profile.origins.items() if origin == BY}


def splits(profile: Profile) -> bool:
    """Whether layers of a past under it may lie on two devices: one tier, of which nothing is chosen."""
    kept, reads = profile.policy.every is None, profile.prune.reads or profile.recall.reads or profile.reuse.reuses
    views = profile.spec.copied(1) or profile.is_checked
    return kept and not reads and not views and not is_ladder(profile.kv, profile.memory)


def _is_enough(found: Plan, context: int | None) -> bool:
    """Whether it fits; where no window was asked for, with room for an answer."""
    if context is not None or found.profile.context.limit != "auto":
        return found.fits
    return found.most >= min(found.profile.context.reserve + 1, found.limit)


def _packed(subject: Subject, profile: Profile) -> Iterator[Profile]:
    if profile.origins["load.quant"] == DEFAULT.name and not subject.is_quantized:
        yield profile.changed({"load": {"quant": "int4"}}, BY)


def _split(subject: Subject, profile: Profile, room: Room, context: int | None, facts: Facts) -> Plan | None:
    """With as many layers on the card as fit there; None where no number of them does."""
    window = profile.context.limit
    asked = context or min(subject.shape.limit, WINDOW if window == "auto" else window)

    def tried(layers: int, context: int | None) -> Plan:
        return plan(subject, profile.changed({"load": {"layers_on_gpu": layers}}, BY), room, context, facts)

    whole = tried(subject.shape.layers, asked)
    if not whole.weights.layers:
        return None
    low, high = -1, subject.shape.layers if splits(profile) else 0
    if whole.fits:
        return tried(subject.shape.layers, context)
    while high - low > 1:  # fewer layers need less of the card, and more of the host
        middle = (low + high) // 2
        low, high = (middle, high) if tried(middle, asked).fits_card else (low, middle)
    best = tried(low, asked) if low >= 0 else None
    return tried(low, context) if best is not None and best.fits else None
