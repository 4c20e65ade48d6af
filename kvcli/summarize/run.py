"""Make a summary: prefill the parts, check the points about them, and merge the points. All results are events."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvcli.api import Cancel, End, Text, Turn
from kvcli.models.channels import Channels
from kvcli.models.text import render_prompt
from kvcli.settings.schema import NO_PENALTY
from kvcli.summarize.ahead import Ahead, Asked
from kvcli.summarize.check import Checker, Passage, with_ocr
from kvcli.summarize.claim_words import sentences
from kvcli.summarize.events import (
    CacheWriteFailed,
    Done,
    Event,
    MergeBegan,
    MergeEnded,
    PartBegan,
    PartEnded,
    Planned,
    PointReady,
    Stopped,
)
from kvcli.summarize.merge import cited, for_merge, grouped
from kvcli.summarize.parts import spoken_names
from kvcli.summarize.plan import Plan, PlanWindow, make_plan
from kvcli.summarize.points import PointStream, point_of, unique
from kvcli.summarize.request import Request
from kvcli.summarize.result import Answered, Point, Summary
from kvcli.summarize.split import Raw
from kvcli.summarize.wording import FEWEST, Messages, merge_messages, part_messages, wording_of

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.chat.text_session import TextSession
    from kvcli.documents import Document
    from kvcli.summarize.cache import Cache
    from kvcli.summarize.parts import Part

QUOTES = 3  # sentences of the text that replace an empty summary


def summarize(
    model: Model | TextSession,
    documents: Sequence[Document],
    request: Request | None = None,
    *,
    cache: Cache | None = None,
    cancel: Cancel | None = None,
    plan: Plan | None = None,
    ahead: Ahead | None = None,
) -> Iterator[Event]:
    """Yield events of one summary of all documents; `Planned` first, and `Done` last, or `Stopped` after `cancel`.

    `plan` may be made before, for the same documents. Raises UsageError for options that the model does not follow,
    ContextOverflow if nothing fits, and any error of the model's turns. With a cache, finished parts are kept. `ahead`
    answers prompts of `asked_parts`, several at a time; the events are the same.
    """
    if plan is None:
        request = request or Request()
        wording = wording_of(model.info)
        wording.refuse(request, model.info.id)
        plan = make_plan(documents, request, PlanWindow.of(model), wording)
    yield Planned(plan)
    yield from _Run(model, plan, spoken_names(documents), cache, cancel or (lambda: False), ahead).events()


def asked_parts(
    model: TextSession, documents: Sequence[Document], cache: Cache | None, cancel: Cancel, plan: Plan
) -> Iterator[Asked]:
    """Yield the prompts of a summary's parts that have no saved answer. Their answers are saved once they end."""
    yield from _Run(model, plan, spoken_names(documents), cache, cancel).asked()


# end of a sentence with its citations; also brackets, because no sentence ends inside them
_ENDS = re.compile(r"[\[(][^\])\n]*[\])]?|([.!?…\u3002\uff01\uff1f](?:\s*\[[^\[\]\n]*\])*)(?=\s)")


class _Cancelled(Exception):
    """Raised when a turn was cancelled."""


@dataclass
class _Run:
    """A summary in progress."""

    model: Model | TextSession
    plan: Plan
    names: list[str]  # names that may be in citations
    cache: Cache | None
    cancel: Cancel
    ahead: Ahead | None = None
    turns: list[Answered] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unkept: str = ""  # reason why an answer could not be saved
    n_said: int = 0  # emitted points, when parts are joined in order

    @property
    def request(self) -> Request:
        return self.plan.request

    def events(self) -> Iterator[Event]:
        found: list[list[Point]] = []
        try:
            for part in self.plan.parts:
                found.append((yield from self._part(part)))
                if len(self.plan.parts) > 1 and not self.plan.wording.merges:
                    yield from self._joined(found)
            points = found[0] if len(found) == 1 else (yield from self._one(found))
            points = points or (yield from self._quoted())
        except _Cancelled:
            yield Stopped(len(found), len(self.plan.parts), self.cache is not None and not self.unkept)
            return
        parts, turns = len(self.plan.parts), tuple(self.turns)
        yield Done(Summary(tuple(points), self.plan.mode, parts, turns, tuple(self.notes)))

    def asked(self) -> Iterator[Asked]:
        """Yield the prompts of the parts, with the options of their answers."""
        for part in self.plan.parts:
            if self._kept(messages := self._asks(part)) is None:
                ids, ended = self._ids(messages), partial(self._put, part, messages)
                yield Asked(ids, self._options(messages), ended)

    def _put(self, part: Part, messages: Messages, turn: Turn) -> None:
        """Save the answer about a part whose turn has not come, as `_turn` does."""
        if turn.finish != "interrupted" and self.cache is not None:
            turn, pen = self._without_loop(turn, self._ids(messages)), self._pen_of(part)
            deque(pen.write(turn.text, whole=True), maxlen=0)
            if pen.points or len(self.plan.parts) > 1:
                self.cache.put(messages, self.plan.answer, turn)

    def _asks(self, part: Part) -> Messages:
        return part_messages(self.plan.wording, self.request, part, self.plan.unit, len(self.plan.parts))

    def _pen_of(self, part: Part) -> PointStream:
        return self._pen(part.passages, is_final=len(self.plan.parts) == 1, places=not part.cite)

    def _part(self, part: Part) -> Generator[Event, None, list[Point]]:
        plan, of, began = self.plan, len(self.plan.parts), time.perf_counter()
        messages = self._asks(part)
        kept = self._kept(messages)
        yield PartBegan(part, of, plan.prompts[part.number - 1], kept is not None)
        pen = self._pen_of(part)
        turn = yield from self._turn(messages, kept, pen, keeps_nothing=of > 1)
        answered = Answered(turn, (part.number, part.number), False, kept is not None)
        self._took(answered, pen, f"part {part.number} of {of}" if of > 1 else "the answer")
        yield PartEnded(part, of, tuple(pen.points), answered, time.perf_counter() - began)
        return pen.points

    def _one(self, found: list[list[Point]]) -> Generator[Event, None, list[Point]]:
        """Merge the parts' summaries: joined in order if that is no longer than requested, or else by the model."""
        if silent := sum(not points for points in found):
            self.note(f"{silent} of {len(found)} parts are not in the summary: the model wrote nothing about them")
        n_words = sum(point.n_words for point in unique(_flat(found)))
        if not self.plan.wording.merges or n_words <= self.request.words:
            return (yield from self._joined(found))
        passages = [p for part in self.plan.parts for p in part.passages]
        number, spans = 0, [(i, i) for i in range(1, len(found) + 1)]
        while len(found) > 1:
            merged: list[list[Point]] = []
            ends: list[tuple[int, int]] = []
            groups = grouped(found, self._merge_size, self.plan.limit - self.plan.answer)
            for group in groups:
                span = spans[group[0]][0], spans[group[-1]][1]
                points = _flat(found[i] for i in group)
                if points and len(group) > 1:
                    number += 1
                    points = yield from self._merge(points, passages, number, span, len(groups) == 1)
                    if not points:
                        self.note(f"merge {number} had no result, so the points of the parts are listed in order")
                        return (yield from self._joined([*merged, *found[group[0] :]]))
                merged.append(points)
                ends.append(span)
            found, spans = merged, ends
        return found[0]

    def _joined(self, found: Sequence[Sequence[Point]]) -> Generator[Event, None, list[Point]]:
        """Return all points in order without repetitions, and emit the new ones."""
        every = _flat(found)
        points = unique(every)
        if self.plan.wording.merges or len(found) == len(self.plan.parts):
            self.note(_repeated(len(every) - len(points)))
        for point in points[self.n_said :]:
            yield PointReady(point)
        self.n_said = len(points)
        return points

    def _quoted(self) -> Generator[Event, None, list[Point]]:
        """Return the first sentences of the text as quotes, if the model wrote nothing about it."""
        passages = [p for part in self.plan.parts for p in part.passages]
        told = (" ".join(p.text[a:b].split()) for p in passages for a, b in sentences(p.text) if p.text[a] != "#")
        quotes = [f"“{words}”" for words in islice((words for words in told if len(words.split()) >= FEWEST), QUOTES)]
        checker = Checker(passages) if self.request.cite and self.request.check else None
        points = [point_of(Raw(text, "bullet"), checker, self.names, places=True) for text in quotes]
        if points:
            self.note("the model wrote nothing about the text, so the summary quotes its first sentences")
        yield from map(PointReady, points)
        return points

    def _merge(
        self, inputs: list[Point], passages: list[Passage], number: int, span: tuple[int, int], is_final: bool
    ) -> Generator[Event, None, list[Point]]:
        began, plan = time.perf_counter(), self.plan
        messages = merge_messages(self.request, [for_merge(p) for p in inputs], plan.unit)
        kept = self._kept(messages)
        yield MergeBegan(number, len(inputs), len(self._ids(messages)), kept is not None)
        pen = self._pen(cited(inputs, passages), is_final=is_final)
        turn = yield from self._turn(messages, kept, pen, keeps_nothing=False)
        answered = Answered(turn, span, True, kept is not None)
        self._took(answered, pen, f"merge {number}")
        yield MergeEnded(number, tuple(pen.points), answered, time.perf_counter() - began)
        return pen.points

    def _turn(
        self, messages: Messages, kept: Turn | None, pen: PointStream, *, keeps_nothing: bool
    ) -> Generator[Event, None, Turn]:
        """Run a turn, or use the answer of an earlier run. Points are emitted as soon as they are complete.

        `keeps_nothing`: an answer without points is saved as well. For one part of several this is a result. If the
        answer is the whole summary, the next run must ask again.
        """
        if kept is not None:
            yield from pen.write(kept.text, whole=True)
            return kept
        ids, said = self._ids(messages), ""
        if self.cancel() and not self._is_begun(ids):
            raise _Cancelled
        for event in (self.ahead or self.model).stream(ids, **self._options(messages)):
            if isinstance(event, End):
                if event.turn.finish == "interrupted":
                    raise _Cancelled
                turn = self._without_loop(event.turn, ids)
                if not said.startswith(turn.text):
                    pen.forget()
                last = list(pen.write(turn.text, whole=True))
                if pen.points or keeps_nothing:  # saved first, because the consumer may stop iterating
                    yield from self._keep(messages, turn)
                yield from last
                return turn
            yield event
            if isinstance(event, Text):
                said += event.text
                yield from pen.write(said)
        raise AssertionError("a stream ends with End")

    def _options(self, messages: Messages) -> dict[str, Any]:
        # a small model makes things up if penalties keep it from copying the text
        own, copies = self.model.profile.sample, self.plan.wording.sentence is not None
        free = {key: off for key, off in NO_PENALTY.items() if copies and getattr(own, key) is None}
        return {"cancel": self.cancel, "messages": messages, "max_new_tokens": self.plan.answer, **free}

    def _without_loop(self, turn: Turn, prompt: Sequence[int]) -> Turn:
        """Return the turn without its loop, cut before the sentence in which the loop began.

        Lines that were complete have been emitted and are kept: lines of the loop are repetitions.
        """
        if turn.loop is None:
            return turn
        words = Channels(self.model.tokenizer, prompt)
        for token in turn.ids[: len(turn.ids) - turn.loop.length + turn.loop.period]:
            words.push(token)
        line = turn.text.rfind("\n") + 1
        rest = turn.text[line : max(line, len(words.text))]
        ends = [m.end() for m in _ENDS.finditer(rest) if m[1] and len(sentences(f"{rest[: m.start() + 1]} Next")) > 1]
        return replace(turn, text=turn.text[: line + max(ends, default=0)])

    def _kept(self, messages: Messages) -> Turn | None:
        if self.cache is None or self._is_begun(self._ids(messages)):  # an answer that was begun ahead is of this run
            return None
        return self.cache.get(messages, self.plan.answer)

    def _is_begun(self, ids: Sequence[int]) -> bool:
        return self.ahead is not None and self.ahead.has_begun(ids)

    def _keep(self, messages: Messages, turn: Turn) -> Iterator[CacheWriteFailed]:
        why = self.cache.put(messages, self.plan.answer, turn) if self.cache is not None else ""
        if why and not self.unkept:
            self.unkept = why
            self.note(why)
            yield CacheWriteFailed(why)

    def _ids(self, messages: Messages) -> list[int]:
        return render_prompt(self.model.tokenizer, messages, note=self.note, **self.model.template_variables)

    def _merge_size(self, points: Sequence[str]) -> int:
        return len(self._ids(merge_messages(self.request, points, self.plan.unit)))

    def note(self, text: str) -> None:
        """Add a note on the summary, unless it was added before."""
        if text and text not in self.notes:
            self.notes.append(text)

    def _pen(self, passages: Sequence[Passage], *, is_final: bool, places: bool = False) -> PointStream:
        """Return an answer parser that checks citations against these passages; `places`: the prompt has no marks."""
        request, names = self.request, self.names
        checker = Checker(passages) if request.cite and request.check else None
        return PointStream(
            lambda raw: with_ocr(point_of(raw, checker, names, quotes=request.quotes, places=places), passages),
            names,
            is_final=is_final,
            take=lambda answer: self.plan.wording.taken(answer, "\n".join(p.text for p in passages)),
        )

    def _took(self, answered: Answered, pen: PointStream, what: str) -> None:
        self.turns.append(answered)
        if answered.turn.finish == "length":
            self.note(self.plan.wording.cut_note(what, self.plan.answer))
        self.note(answered.turn.stats.approx)
        if answered.turn.finish == "loop":
            self.note(f"{what} repeated itself and was stopped; only the text before the repetition is used")
        if repeated := _repeated(pen.repeated):
            self.note(f"{what}: {repeated}")


def _flat(found: Iterable[Sequence[Point]]) -> list[Point]:
    return [point for points in found for point in points]


def _repeated(n: int) -> str:
    return f"{n} repeated point{'s' * (n > 1)} left out" if n else ""
