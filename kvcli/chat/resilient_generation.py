"""Prefill and generation that survive a lack of memory: fallback steps are applied in turn and reported.

Tokens of a failed forward pass are lost and computed again. Tokens added before it are kept, with their KV.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcli import assemble
from kvcli.chat.memory_recovery import recover_memory
from kvcli.engine.forward_request import Steps
from kvcli.engine.policy.policy import Phase
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.stats import Stats
from kvcli.errors import KvcliError
from kvcli.kv.out_of_memory import CacheFull, catch_cache_full
from kvcli.kv.slots import nbytes
from kvcli.settings.profile import Profile
from kvcli.settings.schema import size_of
from kvcli.settings.sources import set_value

if TYPE_CHECKING:
    from kvcli.chat.text_session import TextSession


class ResilientGeneration:
    """The forward passes of one running answer. A pass that ran out of memory is repeated."""

    def __init__(self, text: TextSession, prompt: int, new: int, stats: Stats) -> None:
        """`prompt`, `new`: tokens of the prompt and, at most, of the answer. Suggested settings leave room for both."""
        self.said: list[str] = []  # text of the answer so far, which an error returns
        self._text, self._prompt, self._end, self._stats = text, prompt, prompt + new, stats
        self._lacks: list[CacheFull] = []  # the error that ended the last pass, raised after its new tokens

    def chunk(self, ids: Sequence[int]) -> Steps[bool]:
        """Prefill the next chunk of `ids`; False once all are prefilled."""
        session = self._text.session
        while True:
            with catch_cache_full() as lacks:
                is_more = yield from session.prefill_chunk(ids)
            if not lacks:
                return is_more
            yield from self._relieve(lacks[0], "read" if session.committed == len(ids) - 1 else "reading")
            if len(ids) >= self._text.limit:
                raise self._explained(lacks[0])

    def step(self, ids: Sequence[int], stop: Collection[int]) -> Steps[Sequence[int]]:
        """Run one forward pass after `ids` and return its new tokens; none if memory has no room for more."""
        session = self._text.session
        while len(ids) < self._end:
            if not self._lacks:
                with catch_cache_full() as self._lacks:
                    if len(session.ids) < len(ids):  # the KV cache was lost; afterwards the last token is pending again
                        while (yield from session.prefill_chunk(ids)):
                            pass
                    most, writer = self._end - len(ids), self._text.writer
                    step = yield from session.step(stop, most) if writer is None else writer.step(session, stop, most)
                    self._stats.add_step(step)
                    return step.new
            if rest := session.ids[len(ids) :]:  # added by the broken pass, but not reported
                self._stats.passes += 1
                self._stats.new += len(rest)
                return rest
            yield from self._relieve(self._lacks.pop(), "answering")
            self._end = min(self._end, self._text.limit)
        return ()

    def _relieve(self, lack: CacheFull, phase: Phase) -> Steps[None]:
        """Apply the next fallback steps and report them; raises the error, explained, if there are none."""
        session, stats = self._text.session, self._stats
        at = session.committed if phase == "reading" else len(session.ids)
        steps, is_over = yield from recover_memory(self._text, phase)
        stats.limit = self._text.limit
        if steps:
            stats.shortages.append(f"memory ran out at {at:,} tokens: {', '.join(steps)} from here on")
        if not is_over:
            raise self._explained(lack)

    def _explained(self, lack: CacheFull) -> CacheFull:
        """Return the error with the memory that the KV takes, and settings with room for the whole answer."""
        session, profile = self._text.session, self._text.profile
        held = sum(nbytes(session.cache, session.view).values())
        lines = list(lack.lines)
        if session.committed:
            lines.append(f"keys and values of {session.committed:,} tokens take {held / (1 << 20):,.1f} MiB")
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
