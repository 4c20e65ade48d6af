"""Recovery when memory runs out: undo the broken forward pass, then apply the next fallback step.

No generated token is lost: token ids are always kept, and keys and values that cannot be saved are computed again from
the ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcli import assemble
from kvcli.engine.forward_request import await_passes
from kvcli.kv.out_of_memory import catch_cache_full, free_caches
from kvcli.kv.slots import nbytes

if TYPE_CHECKING:
    from kvcli.chat.text_session import TextSession
    from kvcli.engine.forward_request import Steps
    from kvcli.engine.policy.policy import Phase
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.kv.slots import KVCache
    from kvcli.settings.profile import Profile


def repair_session(session: GenerationSession) -> bool:
    """Make KV cache and ids agree after a broken pass; True if a compression point was reached but not processed.

    A pass breaks before anything is stored, between two layers, or after its last token. Slots that only some layers
    stored are removed, and a prompt in prefill then ends with the last token that all layers stored.
    """
    session.committed = min(session.committed, max(0, len(session.ids) - 1))
    is_due = session.committed > 0 and session.committed == session.compression_point
    session.rewind(session.committed + 1)
    return is_due


def recover_memory(text: TextSession, phase: Phase) -> Steps[tuple[list[str], bool]]:
    """Repair the session, then apply steps of `memory.fallbacks` until it is ready for a forward pass.

    Returns the steps, and True if the last one succeeded. If the KV cache could not be saved, the session is empty, and
    the caller prefills its ids again.
    """
    session, taken, is_due = text.session, list[str](), False
    free_caches()
    with catch_cache_full() as lacks:
        is_due = repair_session(session)
    if lacks:
        _restart(session, text.profile)
    while text.profile.memory.on_oom == "degrade" and text.profile.memory.fallbacks:
        before = text.profile
        text.switch_profile(text.model.under(next_fallback(before, text.limit)))
        if _apply(session, before, text.profile):
            taken.append(before.memory.fallbacks[0])
            if (yield from _is_ready(session, is_due, phase)):
                return taken, True
    return taken, False


def next_fallback(profile: Profile, limit: int) -> Profile:
    """Return the profile after its next fallback step, such as "kv.v_bits=2" or "context.limit=-25%"."""
    step, *rest = profile.memory.fallbacks
    key, _, value = step.partition("=")
    number: object = int(value) if value.isdigit() else value
    if value.endswith("%"):
        now: Any = limit if key == "context.limit" else profile.values[key]
        number = max(1, int(now * (1 + int(value[:-1]) / 100)))
    return profile.replace(**{"memory.fallbacks": rest, key: number})


def _apply(session: GenerationSession, old: Profile, new: Profile) -> bool:
    """Apply profile `new` to the session; False if there is no memory for its KV cache, and nothing has changed."""
    if _storage(old) != _storage(new):
        with catch_cache_full() as lacks:
            store = assemble.store(session.lm, new, nbytes(session.cache).get(session.lm.device.type, 0))
        if lacks:
            return False
        session.compression_interval = assemble.compression_interval(new)
        with catch_cache_full() as lacks:
            move(session.cache, store, session.lm.storing)
            session.replace_cache(store)
            session.rewind(session.committed + 1)  # the next compression point may differ
        if lacks:
            _restart(session, new)
    session.chunk_rows = assemble.chunk(session.lm, new)
    return True


def move(old: KVCache, new: KVCache, layers: Sequence[int]) -> None:
    """Move slots of these layers from `old` to `new`, one layer at a time, so that only one layer is stored twice."""
    for layer in layers:
        slots = old.slots(layer)
        new.take(layer, slots)
        old.keep(layer, slots.pos < 0)


def _storage(profile: Profile) -> tuple[object, ...]:
    """Return all settings that decide how keys and values are stored."""
    return profile.kv, dataclasses.replace(profile.memory, fallbacks=())


def _is_ready(session: GenerationSession, is_due: bool, phase: Phase) -> Steps[bool]:
    """Process the compression point that the failure preceded, and restart the drafter; False if memory ran out."""
    with catch_cache_full() as lacks:
        if is_due and session.committed:
            yield from session.compress_cache(phase)
        yield from await_passes(session.drafter.start(session.ids, session.sampler))
    return not lacks


def _restart(session: GenerationSession, profile: Profile) -> None:
    """Replace the KV cache by an empty one, because the old cache may be inconsistent."""
    session.committed = 0
    session.rewind(0)  # first: if there is no memory for a new cache, nothing refers to inconsistent slots
    session.replace_cache(assemble.store(session.lm, profile))
