"""Make a summary: read the parts, check what is said of them, make one summary of all. Everything comes as events."""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from kvcli.api import Cancel, End, Text, Turn
from kvcli.models.channels import Channels
from kvcli.models.text import render_prompt
from kvcli.summarize.check import Checker, Passage
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
from kvcli.summarize.point_stream import PointStream, unique
from kvcli.summarize.points import point_of
from kvcli.summarize.request import Request
from kvcli.summarize.result import Answered, Point, Summary
from kvcli.summarize.sentence import FEWEST
from kvcli.summarize.split import Raw
from kvcli.summarize.wording import Messages, merge_messages, part_messages, wording_of

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.chat.text_session import TextSession
    from kvcli.documents import Document
    from kvcli.summarize.cache import Cache
    from kvcli.summarize.parts import Part

QUOTES = 3  # sentences of a text that stand for a summary


def summarize(
    model: Model | TextSession,
    documents: Sequence[Document],
    request: Request | None = None,
    *,
    cache: Cache | None = None,
    cancel: Cancel | None = None,
    plan: Plan | None = None,
) -> Iterator[Event]:
    """One summary of all documents together; `Planned` first, `Done` last, or `Stopped` where `cancel` said so.

    `plan`: made before, of the same documents. Raises UsageError for what the model does not follow, ContextOverflow
    where nothing fits, and whatever the model's turns raise; with a cache, parts that were done stay done.
    """
    if plan is None:
        request = request or Request()
        wording = wording_of(model.info)
        wording.refuse(request, model.info.id)
        plan = make_plan(documents, request, PlanWindow.of(model), wording)
    yield Planned(plan)
    yield from _Run(model, plan, spoken_names(documents), cache, cancel or (lambda: False)).events()


# The end of a sentence with what it cites, and brackets, in which there is none
_ENDS = re.compile(r"[\[(][^\])\n]*[\])]?|([.!?…\u3002\uff01\uff1f](?:\s*\[[^\[\]\n]*\])*)(?=\s)")


class _Cancelled(Exception):
    """A turn was cut short."""


@dataclass
class _Run:
    """One summary under way."""

    model: Model | TextSession
    plan: Plan
    names: list[str]  # that may stand in citations
    cache: Cache | None
    cancel: Cancel
    turns: list[Answered] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unkept: str = ""  # why an answer could not be kept
    n_said: int = 0  # points that went out, of those joined in order

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
        yield Done(
            Summary(
                tuple(points),
                self.plan.mode,
                len(self.plan.parts),
                tuple(self.turns),
                tuple(self.notes),
                checked=self.request.cite and self.request.check,
            )
        )

    def _part(self, part: Part) -> Generator[Event, None, list[Point]]:
        plan, of, began = self.plan, len(self.plan.parts), time.perf_counter()
        messages = part_messages(plan.wording, self.request, part, plan.unit, of)
        kept = self._kept(messages)
        yield PartBegan(part, of, plan.prompts[part.number - 1], kept is not None)
        pen = self._pen(part.passages, is_final=of == 1, places=not part.cite)
        turn = yield from self._turn(messages, kept, pen, keeps_nothing=of > 1)
        answered = Answered(turn, (part.number, part.number), False, kept is not None)
        self._took(answered, pen, f"part {part.number} of {of}" if of > 1 else "the answer")
        yield PartEnded(part, of, tuple(pen.points), answered, time.perf_counter() - began)
        return pen.points

    def _one(self, found: list[list[Point]]) -> Generator[Event, None, list[Point]]:
        """One summary of those of the parts: joined where that is no longer than asked, else by the model."""
        if silent := sum(not points for points in found):
            self.note(f"of {silent} of {len(found)} parts nothing is told: the model wrote nothing about them")
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
                        self.note(f"merge {number} wrote nothing, so the points of the parts are joined in order")
                        return (yield from self._joined([*merged, *found[group[0] :]]))
                merged.append(points)
                ends.append(span)
            found, spans = merged, ends
        return found[0]

    def _joined(self, found: Sequence[Sequence[Point]]) -> Generator[Event, None, list[Point]]:
        """All points in order, each once; those that are new go out."""
        every = _flat(found)
        points = unique(every)
        if self.plan.wording.merges or len(found) == len(self.plan.parts):
            self.note(_repeated(len(every) - len(points)))
        for point in points[self.n_said :]:
            yield PointReady(point)
        self.n_said = len(points)
        return points

    def _quoted(self) -> Generator[Event, None, list[Point]]:
        """The first sentences of the text, as quotes, where a small model told nothing of it."""
        if self.plan.wording.sentence is None:
            return []
        passages = [p for part in self.plan.parts for p in part.passages]
        told = (" ".join(p.text[a:b].split()) for p in passages for a, b in sentences(p.text) if p.text[a] != "#")
        quotes = [f"“{words}”" for words in islice((words for words in told if len(words.split()) >= FEWEST), QUOTES)]
        checker = Checker(passages) if self.request.cite and self.request.check else None
        points = [point_of(Raw(text, "bullet"), checker, self.names, places=True) for text in quotes]
        if points:
            self.note("the model told nothing of the text, so its first sentences stand here as quotes")
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
        """Ask, or take what an earlier run was told. The points come as soon as they are complete.

        `keeps_nothing`: an answer without points is kept as well. Of one part of several it says something; where it
        is the summary, the next run is to ask again.
        """
        if kept is not None:
            yield from pen.write(kept.text, whole=True)
            return kept
        if self.cancel():
            raise _Cancelled
        said = ""
        ids = self._ids(messages)
        # a small model that is kept from repeating what it read makes something up
        copies = self.plan.wording.sentence and self.model.profile.sample.repetition_penalty is None
        how = {"max_new_tokens": self.plan.answer, **({"repetition_penalty": 1.0} if copies else {})}
        events = self.model.stream(ids, cancel=self.cancel, messages=messages, **how)
        for event in events:
            if isinstance(event, End):
                if event.turn.finish == "interrupted":
                    raise _Cancelled
                turn = self._without_loop(event.turn, ids)
                if not said.startswith(turn.text):
                    pen.forget()
                last = list(pen.write(turn.text, whole=True))
                if pen.points or keeps_nothing:  # before the last points go out: whoever reads them may stop reading
                    yield from self._keep(messages, turn)
                yield from last
                return turn
            yield event
            if isinstance(event, Text):
                said += event.text
                yield from pen.write(said)
        raise AssertionError("a stream ends with End")

    def _without_loop(self, turn: Turn, prompt: Sequence[int]) -> Turn:
        """What was said before it went round in a loop, without the sentence in which that began.

        Lines that were whole went out while it was said, and are kept with it: those of the loop say nothing new.
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
        return self.cache.get(messages, self.plan.answer) if self.cache is not None else None

    def _keep(self, messages: Messages, turn: Turn) -> Iterator[CacheWriteFailed]:
        why = self.cache.put(messages, self.plan.answer, turn) if self.cache is not None else ""
        if why and not self.unkept:
            self.unkept = why
            self.note(why)
            yield CacheWriteFailed(why)

    def _ids(self, messages: Messages) -> list[int]:
        return render_prompt(self.model.tokenizer, messages, note=self.note)

    def _merge_size(self, points: Sequence[str]) -> int:
        return len(self._ids(merge_messages(self.request, points, self.plan.unit)))

    def note(self, text: str) -> None:
        """What to know of the summary, said once."""
        if text and text not in self.notes:
            self.notes.append(text)

    def _pen(self, passages: Sequence[Passage], *, is_final: bool, places: bool = False) -> PointStream:
        """From an answer to its points, citations checked against these passages; `places`: it was shown no marks."""
        request, names = self.request, self.names
        checker = Checker(passages) if request.cite and request.check else None
        return PointStream(
            lambda raw: point_of(raw, checker, names, quotes=request.quotes, places=places),
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
            self.note(f"{what} went round in a loop: stopped, and only what stands before that is taken")
        if repeated := _repeated(pen.repeated):
            self.note(f"{what}: {repeated}")


def _flat(found: Iterable[Sequence[Point]]) -> list[Point]:
    return [point for points in found for point in points]


def _repeated(n: int) -> str:
    return f"{n} repeated point{'s' * (n > 1)} left out" if n else ""
