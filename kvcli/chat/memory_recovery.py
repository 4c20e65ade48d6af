"""What is done when memory runs out: back to the last boundary between passes, then the next declared step.

Nothing that was generated is lost: the ids of the text are kept whatever happens, and keys and values that cannot be
saved are computed again from them.
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
    """Make store and ids agree after a pass that broke; returns whether a boundary was reached and not settled.

    A pass breaks before anything is stored, between two layers, or behind its last token: rows that only some layers
    stored go, and a text that was being read ends with what all of them did.
    """
    session.committed = min(session.committed, max(0, len(session.ids) - 1))
    is_due = session.committed > 0 and session.committed == session.boundary
    session.rewind(session.committed + 1)
    return is_due


def recover_memory(text: TextSession, phase: Phase) -> Steps[tuple[list[str], bool]]:
    """Mend the session, then take steps of the profile's `memory.fallbacks` until one leaves it ready for a pass.

    The steps, and whether one did. Where the past could not be saved the session has forgotten it, and the caller reads
    its ids again.
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
    """The profile after its next step, such as "kv.v_bits=2" or "context.limit=-25%"."""
    step, *rest = profile.memory.fallbacks
    key, _, value = step.partition("=")
    number: object = int(value) if value.isdigit() else value
    if value.endswith("%"):
        now: Any = limit if key == "context.limit" else profile.values[key]
        number = max(1, int(now * (1 + int(value[:-1]) / 100)))
    return profile.replace(**{"memory.fallbacks": rest, key: number})


def _apply(session: GenerationSession, old: Profile, new: Profile) -> bool:
    """Have the session go on under `new`; False if what that needs is not there, and nothing has changed."""
    if _storage(old) != _storage(new):
        with catch_cache_full() as lacks:
            store = assemble.store(session.lm, new, nbytes(session.cache).get(session.lm.device.type, 0))
        if lacks:
            return False
        session.every = assemble.compression_interval(new)
        with catch_cache_full() as lacks:
            move(session.cache, store, session.lm.storing)
            session.replace_cache(store)
            session.rewind(session.committed + 1)  # the next boundary may be another
        if lacks:
            _restart(session, new)
    session.chunk_rows = assemble.chunk(session.lm, new)
    return True


def move(old: KVCache, new: KVCache, layers: Sequence[int]) -> None:
    """What `old` holds in these goes to `new`, a layer at a time, so that no more than one lies in both."""
    for layer in layers:
        slots = old.slots(layer)
        new.take(layer, slots)
        old.keep(layer, slots.pos < 0)


def _storage(profile: Profile) -> tuple[object, ...]:
    """All that decides how keys and values are stored."""
    return profile.kv, dataclasses.replace(profile.memory, fallbacks=())


def _is_ready(session: GenerationSession, is_due: bool, phase: Phase) -> Steps[bool]:
    """Settle the boundary that the failure came before, and have the drafter start anew; False if memory ran out."""
    with catch_cache_full() as lacks:
        if is_due and session.committed:
            yield from session.compress_cache(phase)
        yield from await_passes(session.drafter.start(session.ids, session.sampler))
    return not lacks


def _restart(session: GenerationSession, profile: Profile) -> None:
    """Forget everything stored, in a new store: the old one may be torn."""
    session.committed = 0
    session.rewind(0)  # first: should there be no room for another store, nothing refers to what is torn
    session.replace_cache(assemble.store(session.lm, profile))
