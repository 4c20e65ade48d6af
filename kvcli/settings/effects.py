"""Effects of settings on the KV cache and its passes, and needs of methods: effects that must be absent.

A method declares `needs` in its class; a method without it needs nothing. Conflicts are the effects that a need and
the other settings share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvcli.settings.schema import size_of

if TYPE_CHECKING:
    from kvcli.settings.profile import Profile
    from kvcli.settings.schema import Kv, Memory

Effect = Literal[
    "quantizes", "offloads", "caps", "demotes", "spends", "evicts", "selects", "degrades",
    "prunes", "reuses", "condenses", "steps", "drafts", "views",
]  # fmt: skip
EFFECTS: Sequence[Effect] = get_args(Effect)  # in the order of reports
WORDS: Mapping[Effect, str] = {  # of the setting that has the effect
    "quantizes": "rounds keys and values",
    "offloads": "moves old tokens to other memory",
    "caps": "limits the KV cache on the device",
    "demotes": "moves tokens that the policy evicts to other memory",
    "spends": "spreads the KV cache over several precisions",
    "evicts": "evicts tokens",
    "selects": "reads only a part of the KV cache",
    "degrades": "changes the KV cache when memory runs out",
    "prunes": "drops tokens of a prompt",
    "reuses": "reuses KV of another text",
    "condenses": "compresses a chat that outgrows its context window",
    "steps": "accepts reasoning steps of another model",
    "drafts": "drafts token by token",
    "views": "drafts with a part of the KV cache",
}
TIERS: frozenset[Effect] = frozenset({"quantizes", "offloads", "caps", "demotes", "spends"})  # more than one dense tier
WHOLE: frozenset[Effect] = TIERS | {"evicts", "selects"}  # without them: KV of all tokens as computed, in one tier
SMALLER: frozenset[Effect] = frozenset({"quantizes", "evicts", "selects"})  # of a cache that a full one may verify

KV_OF_ALL = "the KV of all tokens as computed, in one place"

LOSSY: frozenset[Effect] = SMALLER | {"prunes", "reuses", "condenses", "steps"}  # they change the text


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a method on the other settings."""

    absent: frozenset[Effect] = frozenset()  # effects with which it does not work
    words: str = ""  # the same, after "needs": what it needs instead
    key: str = ""  # key of the method's table that asks for it; "" = the key that names the method


ALIKE_HEADS = Needs(frozenset({"evicts"}), "heads with the same tokens: set kv_format.joint = 1", "joint")


def is_there(size: str) -> bool:
    """True if a size of `[memory]` enables its tier."""
    return size == "auto" or size_of(size) > 0


def tier_effects(kv: Kv, form: Any, memory: Memory) -> Mapping[Effect, Sequence[str]]:
    """Effects of `[kv]`, the KV format and `[memory]`, each with the keys that cause it; none = one dense tier."""
    bits = [f"kv.{key}" for key in ("k_bits", "v_bits") if getattr(kv, key) < 16]
    away = [f"memory.{key}" for key in ("host", "disk") if is_there(getattr(memory, key))]
    found: dict[Effect, Sequence[str]] = {
        "quantizes": (bits or ["kv_format.method"]) if form.is_active(kv) else bits,
        "offloads": away,
        "caps": ["memory.device"] if memory.device != "auto" else [],
        "demotes": ["memory.evicted"] if memory.demotes else [],
        "spends": ["memory.budget" if memory.budget else "memory.max_loss"] if memory.spends else [],
    }
    return {effect: keys for effect, keys in found.items() if keys}


def effects(profile: Profile) -> Mapping[Effect, Sequence[str]]:
    """Effects of a profile, each with the keys that cause it."""
    spec, steps = profile.spec, profile.memory.fallbacks
    others: dict[Effect, tuple[object, str]] = {
        "evicts": (profile.policy.compression_interval is not None, "policy.name"),
        "selects": (profile.sparse.describe_read, "sparse.method"),
        "degrades": (any(step.startswith(("kv.", "memory.")) for step in steps), "memory.fallbacks"),
        "prunes": (profile.prune.describe_read, "prune.method"),
        "reuses": (profile.reuse.describe_reused, "reuse.method"),
        "condenses": (profile.context.on_overflow == "compress", "context.on_overflow"),
        "steps": (profile.reasoning_steps.takes, "reasoning_steps.method"),
        "drafts": (spec.method != "off", "spec.method"),
        "views": (spec.view_slots(1) or spec.checks, "spec.method"),
    }
    tiers = tier_effects(profile.kv, profile.kv_format.settings, profile.memory)
    return {**tiers, **{effect: [key] for effect, (is_set, key) in others.items() if is_set}}
