"""Prefill and generation that survive a lack of memory: undo the broken pass, then apply the next fallback step.

No token is lost: ids are always kept, and keys and values that cannot be saved are computed again from the ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvcli import assemble
from kvcli.engine.forward_request import Passes, await_passes
from kvcli.engine.policy.policy import Phase
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.stats import Stats
from kvcli.errors import KvcliError
from kvcli.kv.out_of_memory import CacheFull, catch_cache_full, free_caches
from kvcli.kv.slots import KVCache, nbytes
from kvcli.settings.config import set_value
from kvcli.settings.profile import Profile
from kvcli.settings.schema import size_of

if TYPE_CHECKING:
    from kvcli.chat.text_session import TextSession


def repair_session(session: GenerationSession) -> bool:
    """Make KV cache and ids agree after a broken pass; True if a compression point was reached but not processed.

    A pass breaks before anything is stored, between two layers, or after its last token. Slots that only some layers
    stored are removed, and a prompt in prefill then ends with the last token that all layers stored.
    """
    session.committed = min(session.committed, max(0, len(session.ids) - 1))
    is_due = session.committed > 0 and session.committed == session.next_compression_at
    session.rewind(session.committed + 1)
    return is_due


def recover_memory(text_session: TextSession, phase: Phase) -> Passes[tuple[list[str], bool]]:
    """Repair the session, then apply steps of `memory.fallbacks` until it is ready for a forward pass.

    Returns the steps, and True if the last one succeeded. If the KV cache could not be saved, the session is empty, and
    the caller prefills its ids again.
    """
    session, taken, is_due = text_session.session, list[str](), False
    free_caches()
    with catch_cache_full() as lacks:
        is_due = repair_session(session)
    if lacks:
        _restart(session, text_session.profile)
    while text_session.profile.memory.on_oom == "degrade" and text_session.profile.memory.fallbacks:
        before = text_session.profile
        text_session.switch_profile(text_session.model.under(next_fallback(before, text_session.limit)))
        if _apply(session, before, text_session.profile):
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
    """Apply profile `new` to the session. False, with nothing changed, if there is no memory for its KV cache."""
    if _storage(old) != _storage(new):
        with catch_cache_full() as lacks:
            store = assemble.store(session.lm, new, nbytes(session.cache).get(session.lm.device.type, 0))
        if lacks:
            return False
        session.compression_interval = assemble.compression_interval(new)
        with catch_cache_full() as lacks:
            move(session.cache, store, session.lm.storing)
            session.stored_kv.replace(store)
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
        old.evict_except(layer, slots.pos < 0)


def _storage(profile: Profile) -> tuple[object, ...]:
    """Return all settings that decide how keys and values are stored."""
    return profile.kv, dataclasses.replace(profile.memory, fallbacks=())


def _is_ready(session: GenerationSession, is_due: bool, phase: Phase) -> Passes[bool]:
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
    session.stored_kv.replace(assemble.store(session.lm, profile))


class ResilientGeneration:
    """The forward passes of one running answer. A pass that ran out of memory is repeated after a fallback step.

    Tokens of a failed pass are lost and computed again. Tokens added before it are kept, with their KV.
    """

    def __init__(self, text_session: TextSession, prompt: int, new: int, stats: Stats) -> None:
        """`prompt`, `new`: tokens of the prompt and, at most, of the answer. Suggested settings leave room for both."""
        self.said: list[str] = []  # text of the answer so far, which an error returns
        self._text_session, self._prompt, self._end, self._stats = text_session, prompt, prompt + new, stats
        self._lacks: list[CacheFull] = []  # the error that ended the last pass, raised after its new tokens

    def chunk(self, ids: Sequence[int]) -> Passes[bool]:
        """Prefill the next chunk of `ids`; False once all are prefilled."""
        session = self._text_session.session
        while True:
            with catch_cache_full() as lacks:
                is_more = yield from session.prefill_chunk(ids)
            if not lacks:
                return is_more
            yield from self._relieve(lacks[0], "read" if session.committed == len(ids) - 1 else "reading")
            if len(ids) >= self._text_session.limit:
                raise self._explained(lacks[0])

    def step(self, ids: Sequence[int], stop: Collection[int]) -> Passes[Sequence[int]]:
        """Run one forward pass after `ids` and return its new tokens; none if memory has no room for more."""
        session = self._text_session.session
        while len(ids) < self._end:
            if not self._lacks:
                with catch_cache_full() as self._lacks:
                    if len(session.ids) < len(ids):  # the KV cache was lost; afterwards the last token is pending again
                        while (yield from session.prefill_chunk(ids)):
                            pass
                    most, writer = self._end - len(ids), self._text_session.writer
                    step = yield from session.step(stop, most) if writer is None else writer.step(session, stop, most)
                    self._stats.add_step(step)
                    return step.new
            if rest := session.ids[len(ids) :]:  # added by the broken pass, but not reported
                self._stats.passes += 1
                self._stats.new += len(rest)
                return rest
            yield from self._relieve(self._lacks.pop(), "answering")
            self._end = min(self._end, self._text_session.limit)
        return ()

    def _relieve(self, lack: CacheFull, phase: Phase) -> Passes[None]:
        """Apply the next fallback steps and report them; raises the error, explained, if there are none."""
        session, stats = self._text_session.session, self._stats
        at = session.committed if phase == "reading" else len(session.ids)
        steps, is_over = yield from recover_memory(self._text_session, phase)
        stats.limit = self._text_session.limit
        if steps:
            stats.shortages.append(f"out of memory at {at:,} tokens; continuing with {', '.join(steps)}")
        if not is_over:
            raise self._explained(lack)

    def _explained(self, lack: CacheFull) -> CacheFull:
        """Return the error with the memory that the KV takes, and settings with room for the whole answer."""
        session, profile = self._text_session.session, self._text_session.profile
        held = sum(nbytes(session.stored_kv).values())
        lines = list(lack.lines)
        if session.committed:
            lines.append(f"the KV cache of {session.committed:,} tokens takes {held / (1 << 20):,.1f} MiB")
        detail = {**lack.detail, "tokens": session.committed, "kv_bytes": held, "answer": "".join(self.said)}
        ways = _shorter(lack.most or session.committed, self._prompt, profile)
        for changes in _larger(session, profile):
            if _holds(session, profile, changes, self._end):
                ways.append(" ".join(f"--set {key}={set_value(value)}" for key, value in changes.items()))
        return CacheFull(lack.message, lines=lines, detail=detail, try_=lack.try_ or ways)


def _larger(session: GenerationSession, profile: Profile) -> Iterator[dict[str, object]]:
    """Yield changes of the profile that may free memory."""
    if profile.memory.device != "auto":
        yield {"memory.device": "auto"}
    if profile.kv.k_bits == profile.kv.v_bits == 16:
        rounding = {"exactness": "approx"} if profile.exactness != "approx" else {}
        yield {**rounding, "kv.k_bits": 8, "kv.v_bits": 8}
    if not size_of(profile.memory.disk):
        yield {"memory.disk": "8GiB"}
    if (chunk := assemble.chunk(session.lm, profile) // 4) >= 1:
        yield {"prefill.chunk": chunk}


def _holds(session: GenerationSession, profile: Profile, changes: dict[str, object], n: int) -> bool:
    """True if a KV cache under the changed profile can be made and has room for n tokens."""
    with suppress(KvcliError), catch_cache_full():
        changed = profile.replace(**changes)
        plan = assemble.plan(session.lm, changed, nbytes(session.cache).get(session.lm.device.type, 0))
        plan.store()
        kept = n if changed.memory.demotes else max(changed.policy.slots(n), changed.policy.max_slots_in_prefill(n))
        return plan.room.holds(kept)
    return False


def _shorter(most: int, prompt: int, profile: Profile) -> list[str]:
    """Suggest a context window of `most` tokens, if it leaves room for an answer."""
    room = most - prompt
    if room < 1:
        return []
    enough = room >= min(profile.context.reserve, profile.sample.max_new_tokens)
    return [f"--ctx {most}" if enough else f"--ctx {most} --max-new-tokens {room}"]
