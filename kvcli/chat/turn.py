"""A turn: the prefill of a prompt and the generation of an answer, as events with measured figures."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from kvcli import assemble, environment
from kvcli.api import Cancel, Event, Finish, Live, Read, Text, Thought, Turn
from kvcli.chat.resilient_generation import ResilientGeneration
from kvcli.engine.forward_request import Coroutine
from kvcli.engine.resources import peak_bytes, used_bytes
from kvcli.engine.sequence.state import RepetitionDetector
from kvcli.engine.stats import Stats
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import hit_rate, nbytes
from kvcli.models.channels import Channels, Piece
from kvcli.models.text import StopStrings

if TYPE_CHECKING:
    from kvcli.chat.text_session import TextSession
    from kvcli.engine.sequence.constraint import Constraint
    from kvcli.engine.sequence.sampler import Sampler
    from kvcli.engine.sequence.state import KindSpan
    from kvcli.kv.slots import Loss
    from kvcli.settings.profile import Profile

# Notes for the user about KV that an approximate profile evicts, quantizes or skips.


def describe_losses(profile: Profile) -> dict[Loss, str]:
    """Describe each kind of loss that the profile can cause. Kinds that it cannot cause are left out."""
    words: dict[Loss, str] = {}
    kv, held = profile.kv, profile.policy.describe_kept
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


MEASURE_EVERY = 0.1  # seconds between two memory measurements


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
    stop_loops: int = 0  # tokens of one repeated cycle that end the answer; 0 = never
    constraint: Constraint | None = None


class TurnRun:
    """A running answer."""

    def __init__(self, text_session: TextSession, asked: TurnRequest) -> None:
        self._text_session, self._asked = text_session, asked
        self._stats = Stats(prompt=len(asked.ids), limit=text_session.limit, load=text_session.info.load_seconds)
        self._stats.sampling = asdict(asked.sampler)
        self._steady = ResilientGeneration(text_session, len(asked.ids), asked.new, self._stats)
        self._cancel = _latched(asked.cancel)
        self._measured = 0.0  # time of the last memory measurement
        self._fetched = 0.0  # seconds to load KV from the pack and the prefix cache

    def events(self) -> Coroutine[Event, Turn]:
        """Yield Live and Read first, then Thought and Text pieces. The session stays usable however the answer ends."""
        session, asked = self._text_session.session, self._asked
        try:
            session.start_answer(asked.ids, asked.sampler, asked.constraint, asked.kind_spans)
            began = time.perf_counter()
            self._stats.cached = self._text_session.fetch(asked.ids)
            self._fetched = time.perf_counter() - began
            profile = self._text_session.profile
            by_layers = profile.prune.describe_read or profile.prefill.order == "layers"
            self._stats.order = "layers" if by_layers else "chunks"
            yield Live(self._stats)
            with environment.return_large_blocks():
                yield from self._read()
            return (yield from self._write())
        except (GeneratorExit, CacheFull):  # the session stays usable after a lack of memory
            raise
        except BaseException:
            session.rewind(0)  # after any other error, the next question starts with an empty KV cache
            raise

    def _read(self) -> Coroutine[Event, None]:
        stats, began = self._stats, time.perf_counter()
        while (yield from self._steady.chunk(self._asked.ids)):
            stats.read = time.perf_counter() - began
            if (reuse := assemble.span_reuse(self._text_session.session, self._text_session.profile)) is not None:
                stats.reused = reuse.reused
            self._measure()
            yield Read(self._text_session.session.progress, stats.prompt, stats.cached, stats.read)
            if self._cancel():
                return
        stats.read = time.perf_counter() - began
        self._measure(at_once=True)
        yield Read(stats.prompt, stats.prompt, stats.cached, stats.read)

    def _write(self) -> Coroutine[Event, Turn]:
        stats, asked = self._stats, self._asked
        words = Channels(self._text_session.tokenizer, asked.ids, asked.strings, is_split=asked.constraint is None)
        ids, answer = list(asked.ids), list[int]()
        before = self._text_session.session.drafter.report()
        loops, loop = RepetitionDetector(asked.stop_loops, asked.ids), None
        finish: Finish = "length"
        shown = 0  # tokens of the answer that were already sent with a piece
        while len(answer) < asked.new and not self._cancel():
            added = yield from self._steady.step(ids, asked.stops)
            if not added:
                break
            ids += added
            stats.first_token = stats.first_token or self._fetched + stats.read + stats.decode
            self._measure()
            pieces = list[Piece]()
            for i in added:  # one by one: tokens after a stop string do not count, even those of the same pass
                answer.append(i)
                pieces += words.push(i) if i not in asked.stops else []
                loop = loops.push(i) if i not in asked.stops and not asked.strings.is_hit else None
                if asked.strings.is_hit or loop:
                    break
            if pieces:
                yield from self._tell(pieces, answer[shown:])
                shown = len(answer)
            if asked.strings.is_hit or loop or answer[-1] in asked.stops:
                finish = "loop" if loop else "stop"
                break
        if finish == "length" and len(answer) < min(asked.new, self._text_session.limit - stats.prompt):
            finish = "interrupted"
        yield from self._tell(words.finish(), answer[shown:])
        self._measure(at_once=True)
        if (foretell := self._text_session.foretell) is not None:
            stats.estimate, stats.available = foretell(self._text_session.profile, stats.context)
        if (report := self._text_session.session.drafter.report()) is not None and before is not None:
            stats.add_draft_report(before, report)
        return Turn(words.text, tuple(answer), finish, stats, loop, words.thinking.strip())

    def _tell(self, pieces: Sequence[Piece], ids: Sequence[int]) -> Iterator[Event]:
        """Yield neighbouring pieces of one channel as one event. The ids belong to the first event."""
        for thinks, group in groupby(pieces, key=lambda piece: piece[0]):
            piece = "".join(text for _, text in group)
            self._steady.said += [] if thinks else [piece]
            yield (Thought if thinks else Text)(piece, tuple(ids))
            ids = ()

    def _measure(self, at_once: bool = False) -> None:
        """Measure memory, at most each `MEASURE_EVERY` seconds: it takes a tenth of a small model's pass time."""
        stats, session = self._stats, self._text_session.session
        lm, writer = session.lm, self._text_session.writer
        stats.context = len(session.ids)
        if not at_once and time.perf_counter() - self._measured < MEASURE_EVERY:
            return
        self._measured = time.perf_counter()
        if at_once:
            found = session.policy.describe_result(session.policy_record.state) if session.policy is not None else ""
            stats.approx = approximation_note(self._text_session.profile, session.approximations, found)
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
