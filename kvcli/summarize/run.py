"""Make a summary: read the parts, check what is said of them, make one summary of all. Everything comes as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcli.api import Cancel, End, Text, Turn
from kvcli.summarize.check import Checker, Passage, named
from kvcli.summarize.cites import write
from kvcli.summarize.events import (
    Done,
    Event,
    MergeBegan,
    MergeEnded,
    PartBegan,
    PartEnded,
    Planned,
    Said,
    Stopped,
)
from kvcli.summarize.pen import Pen, unique
from kvcli.summarize.plan import Plan, Window, make_plan
from kvcli.summarize.points import point_of, split
from kvcli.summarize.prompt import Messages, merge_messages, part_messages, wording_of
from kvcli.summarize.request import Request
from kvcli.summarize.result import Answered, Point, Summary
from kvcli.text import render_prompt

if TYPE_CHECKING:
    from kvcli.documents import Document
    from kvcli.local import Model
    from kvcli.summarize.cache import Cache
    from kvcli.summarize.parts import Part


def summarize(
    model: Model,
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
        wording = wording_of(model.info.path)
        wording.refuse(request, model.info.id)
        plan = make_plan(documents, request, Window.of(model), wording)
    yield Planned(plan)
    yield from _Run(model, plan, cache, cancel or (lambda: False)).events()


def summary_of(
    model: Model, documents: Sequence[Document], request: Request | None = None, **options: object
) -> Summary:
    """The same, all at once."""
    for event in summarize(model, documents, request, **options):  # type: ignore[arg-type]
        if isinstance(event, Done):
            return event.summary
    raise KeyboardInterrupt  # only `cancel` ends it earlier


class _Cancelled(Exception):
    """A turn was cut short."""


@dataclass
class _Run:
    """One summary under way."""

    model: Model
    plan: Plan
    cache: Cache | None
    cancel: Cancel
    turns: list[Answered] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def request(self) -> Request:
        return self.plan.request

    @property
    def names(self) -> list[str]:
        """Documents that stand in citations."""
        return sorted({piece.document for part in self.plan.parts for piece in part.pieces if piece.document})

    def events(self) -> Iterator[Event]:
        found: list[list[Point]] = []
        try:
            for part in self.plan.parts:
                found.append((yield from self._part(part)))
            points = found[0] if len(found) == 1 else (yield from self._one(found))
        except _Cancelled:
            yield Stopped(len(found), len(self.plan.parts), self.cache is not None)
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
        messages = part_messages(plan.wording, self.request, part.text, plan.unit, part.number, of)
        kept = self._kept(messages)
        yield PartBegan(part, of, plan.prompts[part.number - 1], kept is not None)
        pen = Pen(self._pointer(part.passages), is_final=of == 1)
        turn = yield from self._turn(messages, kept, pen)
        answered = Answered(turn, (part.number, part.number), False, kept is not None)
        self._note(answered, pen, f"part {part.number} of {of}" if of > 1 else "the answer")
        yield PartEnded(part, of, tuple(pen.points), answered, time.perf_counter() - began)
        return pen.points

    def _one(self, found: list[list[Point]]) -> Generator[Event, None, list[Point]]:
        """One summary of those of the parts: joined where that is no longer than asked, else by the model."""
        joined = unique([point for points in found for point in points])
        if not self.plan.wording.merges or sum(point.n_words for point in joined) <= self.request.words:
            self.notes += [n] if (n := _repeated(sum(map(len, found)) - len(joined))) else []
            for point in joined:
                yield Said(point)
            return joined
        passages = [p for part in self.plan.parts for p in part.passages]
        number, spans = 0, [(i, i) for i in range(1, len(found) + 1)]
        while len(found) > 1:
            merged: list[list[Point]] = []
            ends: list[tuple[int, int]] = []
            groups = self._groups(found)
            for group in groups:
                number += 1
                span = spans[group[0]][0], spans[group[-1]][1]
                inputs = [point for i in group for point in found[i]]
                if len(group) == 1:
                    merged.append(inputs)
                else:
                    merged.append((yield from self._merge(inputs, passages, number, span, len(groups) == 1)))
                ends.append(span)
            found, spans = merged, ends
        return found[0]

    def _merge(
        self, inputs: list[Point], passages: list[Passage], number: int, span: tuple[int, int], is_final: bool
    ) -> Generator[Event, None, list[Point]]:
        began, plan = time.perf_counter(), self.plan
        messages = merge_messages(plan.wording, self.request, [_for_merge(p) for p in inputs], plan.unit)
        kept = self._kept(messages)
        yield MergeBegan(number, len(inputs), len(self._ids(messages)), kept is not None)
        pen = Pen(self._pointer(_cited(inputs, passages)), is_final=is_final)
        turn = yield from self._turn(messages, kept, pen)
        answered = Answered(turn, span, True, kept is not None)
        self._note(answered, pen, f"merge {number}")
        yield MergeEnded(number, tuple(pen.points), answered, time.perf_counter() - began)
        return pen.points

    def _turn(self, messages: Messages, kept: Turn | None, pen: Pen) -> Generator[Event, None, Turn]:
        """Ask, or take what an earlier run was told. The points come as soon as they are complete."""
        if kept is not None:
            yield from pen.write(kept.text, whole=True)
            return kept
        if self.cancel():
            raise _Cancelled
        said = ""
        ids = self._ids(messages)
        events = self.model.stream(ids, max_new_tokens=self.plan.answer, cancel=self.cancel, messages=messages)
        for event in events:
            if isinstance(event, End):
                if event.turn.finish == "interrupted":
                    raise _Cancelled
                if self.cache is not None and (note := self.cache.put(messages, self.plan.answer, event.turn)):
                    self.notes += [note] if note not in self.notes else []
                yield from pen.write(event.turn.text, whole=True)
                return event.turn
            yield event
            if isinstance(event, Text):
                said += event.text
                yield from pen.write(said)
        raise AssertionError("a stream ends with End")

    def _kept(self, messages: Messages) -> Turn | None:
        return self.cache.get(messages, self.plan.answer) if self.cache is not None else None

    def _ids(self, messages: Messages) -> list[int]:
        def note(text: str) -> None:
            if text not in self.notes:
                self.notes.append(text)

        return render_prompt(self.model.tokenizer, messages, note=note)

    def _pointer(self, passages: Sequence[Passage]) -> Callable[[str], list[Point]]:
        """From an answer to its points, citations checked against these passages."""
        request, names = self.request, self.names
        checker = Checker(passages) if request.cite and request.check else None

        def points(answer: str) -> list[Point]:
            return [point_of(raw, checker, names, quotes=request.quotes) for raw in split(answer)]

        return points

    def _groups(self, found: list[list[Point]]) -> list[list[int]]:
        """Which summaries are merged at once: as many as the window holds, two at least."""
        plan = self.plan
        groups: list[list[int]] = [[]]
        for i in range(len(found)):
            texts = [_for_merge(p) for j in [*groups[-1], i] for p in found[j]]
            size = len(self._ids(merge_messages(plan.wording, self.request, texts, plan.unit)))
            if len(groups[-1]) >= 2 and size + plan.answer > plan.limit:
                groups.append([])
            groups[-1].append(i)
        return groups

    def _note(self, answered: Answered, pen: Pen, what: str) -> None:
        self.turns.append(answered)
        if answered.turn.finish == "length":
            more = "; a greater --length allows more" if "length" in self.plan.wording.follows else ""
            self.notes.append(f"{what} was cut at {self.plan.answer:,} tokens{more}")
        if note := _repeated(pen.repeated):
            self.notes.append(f"{what}: {note}")


def _cited(points: Sequence[Point], passages: Sequence[Passage]) -> list[Passage]:
    """The passages that a merge may cite: those that the points before it cite."""
    places = [passage.place for passage in passages]
    cited = {cite.place for point in points for cite in point.cites if cite.confirmed}
    allowed = {i for place in cited for i in named(place, places)}
    return [passages[i] for i in sorted(allowed)]


def _for_merge(point: Point) -> str:
    """A point as the merge reads it: with the citations that hold."""
    places = list(dict.fromkeys(cite.place for cite in point.cites if cite.confirmed))
    return f"{point.text.removesuffix('.')} {write(places)}." if places else point.text


def _repeated(n: int) -> str:
    return f"{n} repeated point{'s' * (n > 1)} left out" if n else ""
