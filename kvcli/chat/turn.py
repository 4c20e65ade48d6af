"""A turn: the prefill of a prompt and the generation of an answer, as events with measured figures.

Both survive a lack of memory: the broken pass is undone, and the next fallback step is applied. No token is lost: ids
are always kept, and keys and values that cannot be saved are computed again from the ids.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvcli import assemble
from kvcli.api import Cancel, Event, Finish, Live, Read, Text, Thought, TokenScore, ToolCall, Turn, Waiting
from kvcli.chat.scores import scores_of
from kvcli.engine.forward_request import Coroutine, Passes, await_passes, run_until_cancelled
from kvcli.engine.policy.policy import Phase
from kvcli.engine.resources import peak_bytes, used_bytes
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.sequence.state import RepetitionDetector
from kvcli.engine.stats import Stats, Step
from kvcli.errors import KvcliError
from kvcli.kv.out_of_memory import CacheFull, catch_cache_full, free_caches
from kvcli.kv.slots import KVCache, hit_rate, nbytes
from kvcli.models.channels import Channels, Piece
from kvcli.models.text import StopStrings
from kvcli.settings.config import set_value
from kvcli.settings.profile import Profile
from kvcli.settings.schema import size_of, stepped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvcli.engine.sequence.constraint import Constraint
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.engine.sequence.state import KindSpan, Repetition
    from kvcli.kv.slots import Loss
    from kvcli.methods.answer_writer import AnswerWriter
    from kvcli.models.tool_calls import CallReader

# Notes for the user about KV that an approximate profile evicts, quantizes or skips.


def describe_losses(profile: Profile) -> dict[Loss, str]:
    """Describe each kind of loss that the profile can cause. Kinds that it cannot cause are left out."""
    words: dict[Loss, str] = {}
    kv, held = profile.kv, profile.policy.footprint(0).says
    demotes = bool(held) and profile.memory.demotes and not profile.memory.spends
    kept = "drops tokens beyond its capacity" if demotes else held and f"keeps {held}"
    outlives = profile.context.on_overflow == "compress" and "compresses tokens older than the context window"
    if forgotten := [
        *filter(None, (kept, profile.prune.describe_read and f"reads {profile.prune.describe_read}", outlives))
    ]:
        words["forgotten"] = " and ".join(forgotten)
    if profile.memory.spends:
        words["rounded"] = f"stores the rest in {' and '.join(map(str, profile.memory.bits))} bits"
    elif min(kv.k_bits, kv.v_bits) < 16:
        alike = f"keys and values in {kv.k_bits} bits"
        words["rounded"] = "stores " + (
            alike if kv.k_bits == kv.v_bits else f"keys in {kv.k_bits} and values in {kv.v_bits} bits"
        )
    elif profile.kv_format.is_active(kv):
        words["rounded"] = f"stores older keys and values in KV format {profile.kv_format.method}"
    elif kv.dtype not in ("auto", profile.load.dtype):
        words["rounded"] = f"stores keys and values in {kv.dtype}"
    if read := profile.sparse.describe_read:
        words["unread"] = f"reads {read}"
    if profile.reuse.describe_reused:
        words["reused"] = profile.reuse.describe_reused
    if demotes and (last := "unread" if read else "rounded") in words:
        words[last] += f"; in addition {held}"
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
        return f"profile {profile.name}: {found}; no tokens were lost"
    words += filter(None, [found])
    if not words:
        return ""
    by, exact = profile.name, "-P exact"
    if profile.origins["memory.budget"] == "--budget":  # it applies to -P exact too
        by, exact = f"{by} --budget {profile.memory.budget}", f"{exact} without --budget"
    return f"approximate answer: profile {by} {', '.join(words)}, so facts may be missing; {exact} uses the full text"


# Memory: repair after a broken pass, and fallback steps.


def repair_session(session: GenerationSession) -> bool:
    """Make KV cache and ids agree after a broken pass; True if a compression point was reached but not processed.

    A pass breaks before anything is stored, between two layers, or after its last token. Slots that only some layers
    stored are removed, and a prompt in prefill then ends with the last token that all layers stored.
    """
    session.committed = min(session.committed, max(0, len(session.ids) - 1))
    is_due = session.committed > 0 and session.committed == session.next_compression_at
    session.rewind(session.committed + 1)
    return is_due


def next_fallback(profile: Profile, limit: int) -> Profile:
    """Return the profile after its next fallback step, such as "kv.v_bits=2" or "context.limit=-25%"."""
    step, *rest = profile.memory.fallbacks
    key, _, value = step.partition("=")
    now: Any = limit if key == "context.limit" else profile.values[key]
    return profile.replace(**{"memory.fallbacks": rest, key: value if isinstance(now, str) else stepped(now, value)})


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
        of = changed.policy.footprint(n)
        return plan.room.holds(n if changed.memory.demotes else max(of.slots, of.peak))
    return False


def _shorter(most: int, prompt: int, profile: Profile) -> list[str]:
    """Suggest a context window of `most` tokens, if it leaves room for an answer."""
    room = most - prompt
    if room < 1:
        return []
    enough = room >= min(profile.context.reserve, profile.sample.max_new_tokens)
    return [f"--ctx {most}" if enough else f"--ctx {most} --max-new-tokens {room}"]


# The answer.


MEASURE_EVERY = 0.1  # seconds between two memory measurements


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Settings of a running answer, which a lack of memory may change."""

    profile: Profile
    limit: int  # tokens of the context window
    writer: AnswerWriter | None  # writes in place of plain decoding, if the profile asks for it


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """Limit of the thinking before an answer, whose tokens do not count as the answer's."""

    tokens: int  # at most, and without those of `end`
    begin: str = ""  # text that begins a thought after the prompt; "" = it has begun
    end: str = ""  # text that ends a thought
    end_ids: Sequence[int] = ()  # its tokens
    is_due: bool = False  # a constraint waits for the end of a thought


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A prompt, and the conditions that end its answer."""

    ids: list[int]
    kind_spans: list[KindSpan]  # spans of prompt tokens of one kind each
    new: int  # tokens of the answer, at most
    stops: Collection[int]
    strings: StopStrings
    cancel: Cancel
    sampler: Sampler
    top_logprobs: int | None = None  # likely tokens in the score of each token; None = no scores
    stop_loops: int = 0  # tokens of one repeated cycle that end the answer; 0 = never
    constraint: Constraint | None = None
    thinking: ThinkingLimit | None = None  # None: thoughts count as the answer
    calls: CallReader | None = None  # splits off tool calls; None: there are no tools


class TurnRun:
    """A running answer."""

    def __init__(
        self,
        session: GenerationSession,
        asked: TurnRequest,
        terms: AnswerSettings,
        *,
        tokenizer: PreTrainedTokenizerBase,
        load_seconds: float,
        fetch: Callable[[Sequence[int]], Generator[Waiting]],
        switch: Callable[[Profile], AnswerSettings],
        free_memory: Callable[[], Generator[Waiting, None, bool]],
    ) -> None:
        """`fetch`: loads saved KV of the prompt. `switch`: returns the terms under another profile of the same weights.
        `free_memory`: frees memory of other sequences after a pass that lacked it, perhaps after a wait; False = there
        is none.
        """
        self.session, self.terms, self._asked = session, terms, asked
        self._fetch, self._switch, self._free_memory = fetch, switch, free_memory
        self._stats = Stats(prompt=len(asked.ids), limit=terms.limit, load=load_seconds)
        self._stats.sampling = asked.sampler.numbers
        thinking = self._thinking = asked.thinking or ThinkingLimit(0)
        around = {"begin": thinking.begin, "end": thinking.end}
        is_split = asked.constraint is None or thinking.is_due
        self._words = Channels(tokenizer, asked.ids, asked.strings, is_split=is_split, **around)
        self._said: list[str] = []  # text of the answer so far, which an error returns
        # of the answer's tokens, if asked for
        self._scores: list[TokenScore] | None = [] if asked.top_logprobs is not None else None
        # most tokens of prompt and answer
        self._end = min(len(asked.ids) + asked.new + thinking.tokens + len(thinking.end_ids), terms.limit)
        self._waits = thinking.is_due  # the constraint begins after the thought
        self._cancel = _latched(asked.cancel)
        self._measured = 0.0  # time of the last memory measurement

    @property
    def ids(self) -> Sequence[int]:
        """Tokens of the prompt."""
        return self._asked.ids

    @property
    def most_tokens(self) -> int:
        """Most tokens of prompt and answer."""
        return self._end

    def restart(self) -> bool:
        """Drop the KV cache of the suspended answer, which is computed again when it goes on. False if a part of it was
        not computed by this answer and would become another."""
        is_partial = any(start for start, _ in self.session.prefills[:1]) or "reuses" in self.terms.profile.effects
        if is_partial and not assemble.is_lossless(self.terms.profile):
            return False
        _restart(self.session, self.terms.profile)
        return True

    def events(self) -> Coroutine[Event, Turn]:
        """Yield Live and Read first, then Thought and Text pieces. A pass that ran out of memory is repeated after a
        fallback step: its tokens are computed again, and tokens added before it are kept, with their KV.
        """
        session, asked, stats, words = self.session, self._asked, self._stats, self._words
        constraint, profile, began = None if self._waits else asked.constraint, self.terms.profile, time.perf_counter()
        stats.cached = session.start_answer(
            asked.ids, asked.sampler, constraint, asked.kind_spans,
            is_scored=self._scores is not None, replays=not assemble.is_lossless(profile),
        )  # fmt: skip
        yield from self._fetch(asked.ids)
        if session.committed != stats.cached:
            stats.cached = session.skip_loaded()
        fetched = time.perf_counter() - began
        by_layers = profile.prune.describe_read or profile.prefill.order == "layers"
        stats.order = "layers" if by_layers else "chunks"
        yield Live(stats)
        with session.lm.large_blocks.returned():
            yield from self._read()
        ids, answer = list(asked.ids), list[int]()
        before = session.drafter.report()
        loops, loop = RepetitionDetector(asked.stop_loops, asked.ids), None
        finish: Finish = "length"
        shown = 0  # tokens of the answer that were already sent with a piece
        while len(answer) - stats.thinking < asked.new and len(ids) < self._end and not self._cancel():
            thought = stats.thinking
            with catch_cache_full() as lacks:
                # tokens were forced, or the KV cache was lost; afterwards the last token is pending
                if len(session.ids) < len(ids):
                    yield from session.compute(ids)
                most, writer = min(self._end - len(ids), self._most(len(answer))), self.terms.writer
                # with these stops, a pass adds no token after a thought that a constraint waits for
                stops = {*asked.stops, *self._thinking.end_ids} if self._waits else asked.stops
                work: Passes[Step | None] = session.step(stops, most)
                if writer is not None:
                    work = run_until_cancelled(writer.step(session, stops, most), self._cancel)
                if (made := (yield from work)) is None:
                    break
                stats.add_step(step := made)
            if lacks and self._scores is not None:  # a broken pass leaves no scores: its tokens are sampled again
                session.resume(ids)
            added = session.ids[len(ids) :] if lacks else step.new  # a broken pass may have added some
            if lacks and added:
                stats.passes += 1
                stats.new += len(added)
            ids += added
            stats.first_token = stats.first_token or fetched + stats.read + stats.decode
            self._measure()
            pieces, forced, at = list[Piece](), None, len(answer)
            for i in added:  # one by one: tokens after a stop string do not count, even those of the same pass
                answer.append(i)
                thinks, is_open = words.thinks, words.is_open
                pieces += self._shown(i) if i not in asked.stops else []
                stats.thinking += thinks or words.thinks
                loop = loops.push(i) if i not in asked.stops and not asked.strings.is_hit else None
                if (forced := self._thought_end(i, is_open, loop)) is not None:
                    answer[-1:] = [*answer[-1:], *forced] if i not in asked.stops else forced
                    stats.thinking = stats.thinking + len(forced) - (i in asked.stops)
                    pieces += [piece for one in forced for piece in words.push(one)]
                    ids, loops, loop = [*asked.ids, *answer], RepetitionDetector(asked.stop_loops, asked.ids), None
                    self._begin_answer(ids)
                    break
                if asked.strings.is_hit or loop:
                    session.answer_end = len(asked.ids) + len(answer)
                    break
            if self._scores is not None and added:
                n = len(answer) - at - len(forced or ())
                self._scores += scores_of(step.logits[list(step.path[:n])], added[:n], asked.top_logprobs or 0)
                self._scores += [TokenScore(i, None) for i in forced or ()]
            stats.thinking_seconds += step.seconds if added and not lacks and stats.thinking > thought else 0.0
            if pieces:
                yield from self._tell(pieces, answer[shown:])
                shown = len(answer)
            if asked.strings.is_hit or loop or (answer and answer[-1] in asked.stops):
                finish = "loop" if loop else "stop"
                break
            if lacks and len(answer) < asked.new:
                yield from self._relieve(lacks[0], "answering")
                self._end = min(self._end, self.terms.limit)
        if finish == "length" and len(answer) - stats.thinking < asked.new and len(ids) < self._end:
            finish = "interrupted"
        found, held = asked.calls.finish() if asked.calls is not None else ([], [])
        called = tuple(ToolCall(*call) for call in found)
        yield from self._tell([*(p for i in held for p in words.push(i)), *words.finish()], answer[shown:])
        yield from called
        finish = "tool_calls" if called and finish == "stop" else finish
        self._measure(at_once=True)
        if (report := session.drafter.report()) is not None and before is not None:
            stats.add_draft_report(before, report)
        scores = tuple(self._scores or ())
        return Turn(words.text, tuple(answer), finish, stats, loop, words.thinking.strip(), called, scores)

    def _shown(self, token: int) -> list[Piece]:
        """Return the pieces that became certain with a token. A thought that mentions calls makes none."""
        calls = self._asked.calls
        certain = [token] if calls is None or self._words.is_open else calls.push(token)
        return [piece for one in certain for piece in self._words.push(one)]

    def _most(self, n: int) -> int:
        """Return how many tokens may be added at once to an answer of n tokens: the end of a thought must be exact."""
        left = self._thinking.tokens - self._stats.thinking
        room = self._asked.new + self._stats.thinking - n
        return min(room, left) if left > 0 and self._thinking.end_ids and not self._words.text else room

    def _thought_end(self, token: int, was_open: bool, loop: Repetition | None) -> Sequence[int] | None:
        """Return the tokens to add after `token` to end a thought whose limit is reached, or which repeats itself.

        They are input, like a prompt. None = the answer goes on. A constraint that waits begins after these tokens.
        """
        end = self._thinking.end_ids
        if end and self._words.is_open:
            is_full = self._stats.thinking >= self._thinking.tokens or loop is not None
            return end if is_full or (self._waits and token in self._asked.stops) else None
        if self._waits and was_open:  # the model ended its thought; the rest of the end, such as line ends, is added
            return end[len(end) - [*reversed(end)].index(token) :] if token in end else ()
        return None

    def _begin_answer(self, ids: Sequence[int]) -> None:
        """Continue with `ids`, whose last tokens are not computed, and from here on under a constraint that waits."""
        self.session.add_input(ids, self._asked.constraint if self._waits else None)
        if self._waits:
            self._waits = False
            self._words.stop_splitting()

    def _read(self) -> Coroutine[Event, None]:
        """Prefill the prompt."""
        session, stats, ids, began = self.session, self._stats, self._asked.ids, time.perf_counter()
        is_more = True
        while is_more:
            with catch_cache_full() as lacks:
                is_more = yield from session.prefill(ids)
            if lacks:
                yield from self._relieve(lacks[0], "read" if session.committed == len(ids) - 1 else "reading")
                if len(ids) >= self.terms.limit:
                    raise self._explained(lacks[0])
                continue
            stats.read = time.perf_counter() - began
            if is_more and (reuse := assemble.span_reuse(session, self.terms.profile)) is not None:
                stats.reused = reuse.reused
            self._measure(at_once=not is_more)
            yield Read(session.progress if is_more else stats.prompt, stats.prompt, stats.cached, stats.read)
            if is_more and self._cancel():
                return

    def _relieve(self, lack: CacheFull, phase: Phase) -> Coroutine[Event, None]:
        """Repair the session, then free memory of other sequences until it is ready for a forward pass. An answer that
        is alone applies steps of `memory.fallbacks`.

        If the KV cache could not be saved, the session is empty, and its ids are prefilled again. Raises the error,
        explained, if no step is left.
        """
        session, is_due, steps, is_ready = self.session, False, list[str](), False
        at = session.committed if phase == "reading" else len(session.ids)
        free_caches()
        with catch_cache_full() as lacks:
            is_due = repair_session(session)
        if lacks:
            _restart(session, self.terms.profile)
        while not is_ready and (yield from self._free_memory()):
            is_ready = yield from _is_ready(session, is_due, phase)
        while not is_ready and self.terms.profile.memory.on_oom == "degrade" and self.terms.profile.memory.fallbacks:
            before = self.terms
            self.terms = self._switch(next_fallback(before.profile, before.limit))
            if _apply(session, before.profile, self.terms.profile):
                steps.append(before.profile.memory.fallbacks[0])
                is_ready = yield from _is_ready(session, is_due, phase)
        self._stats.limit = self.terms.limit
        if steps:
            self._stats.shortages.append(f"out of memory at {at:,} tokens; continuing with {', '.join(steps)}")
        if not is_ready:
            raise self._explained(lack)

    def _explained(self, lack: CacheFull) -> CacheFull:
        """Return the error with the memory that the KV takes, and settings with room for the whole answer."""
        session, profile = self.session, self.terms.profile
        held = sum(nbytes(session.stored_kv).values())
        lines = list(lack.lines)
        if session.committed:
            lines.append(f"the KV cache of {session.committed:,} tokens takes {held / (1 << 20):,.1f} MiB")
        detail = {**lack.detail, "tokens": session.committed, "kv_bytes": held, "answer": "".join(self._said)}
        ways = _shorter(lack.most or session.committed, len(self._asked.ids), profile)
        for changes in _larger(session, profile):
            if _holds(session, profile, changes, self._end):
                ways.append(" ".join(f"--set {key}={set_value(value)}" for key, value in changes.items()))
        return CacheFull(lack.message, lines=lines, detail=detail, try_=lack.try_ or ways)

    def _tell(self, pieces: Sequence[Piece], ids: Sequence[int]) -> Iterator[Event]:
        """Yield neighbouring pieces of one channel as one event. The ids belong to the first event."""
        for thinks, group in groupby(pieces, key=lambda piece: piece[0]):
            piece = "".join(text for _, text in group)
            self._said += [] if thinks else [piece]
            scores = self._scores[-len(ids) :] if self._scores is not None and ids else ()
            yield (Thought if thinks else Text)(piece, tuple(ids), tuple(scores))
            ids = ()

    def _measure(self, at_once: bool = False) -> None:
        """Measure memory, at most each `MEASURE_EVERY` seconds: it takes a tenth of a small model's pass time."""
        stats, session = self._stats, self.session
        lm, writer = session.lm, self.terms.writer
        stats.context = len(session.ids)
        if not at_once and time.perf_counter() - self._measured < MEASURE_EVERY:
            return
        self._measured = time.perf_counter()
        if at_once:
            found = session.policy.describe_result(session.policy_record.state) if session.policy is not None else ""
            stats.approx = approximation_note(self.terms.profile, session.approximations, found)
        stored_first = sorted(session.companions, key=lambda one: one is not session.stored_kv)
        held = (*stored_first, session.drafter, writer)
        stats.kv, stats.page_hit_rate = nbytes(*held), hit_rate(held)
        stats.host_access = next((use.how for use in session.cache.usage() if use.how), "")
        stats.kv_fp16 = 2 * sum(of.numbers for of in lm.shapes) * session.committed
        stats.peak, (stats.used, stats.total) = peak_bytes(lm.device), used_bytes(lm.device)


def _latched(cancel: Cancel) -> Cancel:
    """Return a `cancel` that remains True once it was True, because a half prefilled prompt must not be continued."""
    is_over = False

    def asked() -> bool:
        nonlocal is_over
        is_over = is_over or cancel()
        return is_over

    return asked
