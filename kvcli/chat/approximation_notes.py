"""Notes for the user about KV that an approximate profile evicts, quantizes or skips."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvcli.kv.slots import Loss
    from kvcli.settings.profile import Profile


def describe_losses(profile: Profile) -> dict[Loss, str]:
    """Describe each kind of loss that the profile can cause. Kinds that it cannot cause are left out."""
    words: dict[Loss, str] = {}
    kv, held = profile.kv, profile.policy.describe_kept
    demotes = bool(held) and profile.memory.demotes and not profile.memory.spends
    kept = "forgets what its tiers have no room for" if demotes else held and f"keeps {held}"
    outlives = profile.context.on_overflow == "compress" and "holds what is older than the window in fewer slots"
    if forgotten := [
        *filter(None, (kept, profile.prune.describe_read and f"reads {profile.prune.describe_read}", outlives))
    ]:
        words["forgotten"] = " and ".join(forgotten)
    if profile.memory.spends:
        words["rounded"] = f"holds the rest in {' and '.join(map(str, profile.memory.bits))} bits"
    elif min(kv.k_bits, kv.v_bits) < 16:
        alike = f"keys and values in {kv.k_bits} bits"
        words["rounded"] = "holds " + (
            alike if kv.k_bits == kv.v_bits else f"keys in {kv.k_bits} and values in {kv.v_bits} bits"
        )
    elif profile.kv_format.is_active(kv):
        words["rounded"] = f"holds older keys and values in the form {profile.kv_format.method}"
    elif kv.dtype not in ("auto", profile.load.dtype):
        words["rounded"] = f"holds keys and values in {kv.dtype}"
    if read := profile.sparse.describe_read:
        words["unread"] = f"reads {read}"
    if profile.reuse.describe_reused:
        words["reused"] = profile.reuse.describe_reused
    if demotes and (last := "unread" if read else "rounded") in words:
        words[last] += f", beside {held}"
    return words


def approximation_note(profile: Profile, lost: Collection[Loss], found: str = "") -> str:
    """Return a note on an answer computed after losses of the kinds `lost`; "" if the full KV cache was used.

    Profiles that are exact or error-bounded need no note. `found`: the eviction policy's report on this sequence.
    """
    if profile.exactness != "approx":
        return ""
    words = [words for kind, words in describe_losses(profile).items() if kind in lost]
    words += filter(None, [profile.reasoning_steps.takes])
    if found and not words:
        return f"{profile.name} is {found}; nothing was lost"
    words += filter(None, [found])
    if not words:
        return ""
    by, exact = profile.name, "-P exact"
    if profile.origins["memory.budget"] == "--budget":  # it applies to -P exact too
        by, exact = f"{by} --budget {profile.memory.budget}", f"{exact} without --budget"
    return f"approx: {by} {', '.join(words)}: facts may be lost; {exact} loses none"
