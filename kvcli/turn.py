"""A turn: a prompt is read and an answer written, in events, with figures of what that took."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from kvcli import steady
from kvcli.api import Cancel, End, Events, Finish, Live, Read, Text, Turn
from kvcli.errors import BadInput
from kvcli.kv.shortage import Shortage
from kvcli.kv.slots import nbytes
from kvcli.loops import Loops
from kvcli.losses import approx
from kvcli.memory import peak_bytes
from kvcli.stats import Stats
from kvcli.text import Detokenizer, StopStrings

if TYPE_CHECKING:
    from kvcli.kinds import Span
    from kvcli.local import Model
    from kvcli.sample import Sampler

MEASURE_EVERY = 0.1  # seconds


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and when its answer ends."""

    ids: list[int]
    spans: list[Span]  # what kinds of text they are
    new: int  # tokens of the answer, at most
    stops: Collection[int]
    strings: StopStrings
    cancel: Cancel
    sampler: Sampler
    stop_loops: int = 0  # tokens of one cycle that end it; 0 = none do


class Answering:
    """One answer under way: the last one that a model began is the only one that may go on."""

    def __init__(self, model: Model, asked: Asked) -> None:
        self._model, self._asked = model, asked
        self._stats = Stats(prompt=len(asked.ids), limit=model.limit, load=model.info.load_seconds)
        self._cancel = _latched(asked.cancel)
        self._measured = 0.0  # when memory was last looked at

    def events(self) -> Events:
        """Live and Read first, then Text as it comes, End last. The session survives whatever ends it."""
        model, session = self._model, self._model.session
        model.answering = self
        try:
            session.sampler = self._asked.sampler
            self._stats.cached = session.resume(self._asked.ids)
            session.spans = self._asked.spans
            for event in chain([Live(self._stats)], self._read(), self._write()):
                yield event
                if model.answering is not self and not isinstance(event, End):
                    raise BadInput("another answer began before this one ended", code="interleaved")
        except (GeneratorExit, Shortage):  # the session survives a lack of memory
            raise
        except BaseException:
            if model.answering is self:
                session.rewind(0)  # whatever broke, the next question starts from a past that is right
            raise

    def _read(self) -> Events:
        stats, began = self._stats, time.perf_counter()
        for done in steady.read(self._model, self._asked.ids, self._asked.new, stats):
            stats.read = time.perf_counter() - began
            self._measure()
            yield Read(done, stats.prompt, stats.cached, stats.read)
            if self._cancel():
                return
        stats.read = time.perf_counter() - began
        self._measure(at_once=True)
        yield Read(stats.prompt, stats.prompt, stats.cached, stats.read)

    def _write(self) -> Events:
        stats, new, stops, strings = self._stats, self._asked.new, self._asked.stops, self._asked.strings
        words, said, answer = Detokenizer(self._model.tokenizer), list[str](), list[int]()
        before = self._model.session.drafter.report()
        loops, loop = Loops(self._asked.stop_loops, self._asked.ids), None
        finish: Finish = "length"
        shown = 0  # tokens of the answer that went out with a piece
        for added in steady.answer(self._model, new, stops, self._cancel, stats, said):
            if added:
                stats.first_token = stats.first_token or stats.read + stats.decode
            self._measure()
            piece = ""
            for i in added:  # one by one: behind a stop string nothing counts, however many tokens a pass gave
                answer.append(i)
                piece += strings.push(words.push([i] if i not in stops else []))
                loop = loops.hear(i) if i not in stops and not strings.is_hit else None
                if strings.is_hit or loop:
                    break
            if piece:
                said.append(piece)
                yield Text(piece, tuple(answer[shown:]))
                shown = len(answer)
            if strings.is_hit or loop or (added and answer[-1] in stops):
                finish = "loop" if loop else "stop"
                break
        if finish == "length" and len(answer) < min(new, self._model.limit - stats.prompt):
            finish = "interrupted"
        rest = strings.push(words.finish()) + strings.finish()
        if rest:
            said.append(rest)
            yield Text(rest, tuple(answer[shown:]))
        self._measure(at_once=True)
        if self._model.foretell is not None:
            stats.estimate, stats.available = self._model.foretell(self._model.profile, stats.context)
        if (report := self._model.session.drafter.report()) is not None and before is not None:
            stats.hear(before, report)
        yield End(Turn("".join(said), tuple(answer), finish, stats, loop))

    def _measure(self, at_once: bool = False) -> None:
        """Memory as it is now; as often as people can read it, since asking takes a tenth of a small model's pass."""
        stats, lm, session = self._stats, self._model.lm, self._model.session
        stats.context = len(session.ids)
        if not at_once and time.perf_counter() - self._measured < MEASURE_EVERY:
            return
        self._measured = time.perf_counter()
        if at_once:
            stats.approx = approx(self._model.profile, session.lost)
        stats.kv = nbytes(session.kv, session.view)
        stats.kv_fp16 = 2 * 2 * lm.n_layers * lm.n_kv_heads * lm.head_dim * session.committed
        stats.peak = peak_bytes(lm.device)


def _latched(cancel: Cancel) -> Cancel:
    """The same, but what was cancelled once stays cancelled: a text that was half read must not be continued."""
    is_over = False

    def asked() -> bool:
        nonlocal is_over
        is_over = is_over or cancel()
        return is_over

    return asked
