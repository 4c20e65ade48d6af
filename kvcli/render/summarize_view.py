"""A summary on the screen while it is made: points as they are checked, below them where the work is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcli.api import Event as TurnEvent
from kvcli.api import Text
from kvcli.render import figures as f
from kvcli.render.errors import print_note
from kvcli.render.live import NARROWEST, Look
from kvcli.render.stream import TurnView
from kvcli.render.summarize import hung, merge_done, part_done, stretch
from kvcli.render.summary import DOT
from kvcli.render.tables import clip
from kvcli.render.terminal import Span
from kvcli.summarize.events import Done, MergeBegan, MergeEnded, PartBegan, PartEnded, Planned, Said, Stopped

if TYPE_CHECKING:
    from kvcli.render.screen import Screen
    from kvcli.summarize.events import Event
    from kvcli.summarize.plan import Plan
    from kvcli.summarize.result import Point, Summary

Writer = Callable[[Sequence["Point"]], str]


class SummaryView(TurnView):
    """`writer` makes the text that goes to stdout as points come; None where nothing goes there before the end."""

    def __init__(self, screen: Screen, look: Look, plan: Plan, writer: Writer | None, *, tells: bool = True) -> None:
        super().__init__(screen, look)
        self.plan, self.writer, self.tells = plan, writer, tells and not screen.quiet
        self.summary: Summary | None = None
        self.stopped: Stopped | None = None
        self.step: PartBegan | MergeBegan | None = None
        self.points: list[Point] = []
        self.shown = ""  # of the summary
        self.before = 0  # tokens of prompts that are done and were read by this run
        self.began = screen.clock()

    def on(self, event: Event | TurnEvent) -> None:
        """Take one event."""
        match event:
            case Text() | Planned():  # a point is said when it is complete and checked
                pass
            case PartBegan() | MergeBegan():
                self.step, self.stats, self.read = event, None, None
                self.started = self.screen.clock()
            case PartEnded() | MergeEnded():
                self._ended(event)
            case Said(point):
                self.points.append(point)
                self._write()
            case Stopped():
                self.stopped, self.step = event, None
            case Done(summary):
                self.summary, self.step = summary, None
                self.turn = summary.turns[-1].turn
            case _:
                super().on(event)

    def _ended(self, event: PartEnded | MergeEnded) -> None:
        if self.step is not None and not self.step.is_cached:
            self.before += self.step.prompt
        self.step = None
        if self.tells and len(self.plan.parts) > 1:
            words = part_done(event) if isinstance(event, PartEnded) else merge_done(event)
            for line in hung(words, self.screen.err.width):
                self.screen.err.line((line, "dim"))
        for short in event.answered.turn.stats.shortages if self.tells and not event.answered.is_cached else ():
            print_note(self.screen.err, short)

    def _write(self) -> None:
        """Say what is new: a text of points only grows at its end."""
        if self.writer is None:
            return
        text = self.writer(self.points).rstrip("\n")
        new, self.shown = text[len(self.shown) :], text
        self._say(new)

    def _rows(self, width: int) -> list[list[Span]]:
        return [row for row in (self._head(width), *super()._rows(width)) if row]

    def _head(self, width: int) -> list[Span]:
        """`part 3 of 5 · pages 86–129 · 29,411 tokens · 2:10 left`, where there are several parts."""
        step = self.step
        if step is None or self.screen.quiet or width < NARROWEST or len(self.plan.parts) < 2:
            return []
        if isinstance(step, PartBegan):
            words = [f"part {step.part.number} of {step.of}", stretch(step.part)]
        else:
            words = [f"merge {step.number}", f"{step.n_points} points"]
        left = self._left()
        words += [f"{f.count(step.prompt)} tokens", f"{f.clock(left)} left" if left is not None else ""]
        return [(clip(" " + DOT.join(filter(None, words)), width - 2), "")]

    def _left(self) -> float | None:
        """Seconds: by the pace so far, or by the estimate before there is one."""
        now, step = self.screen.clock() - self.began, self.step
        done = self.before
        if step is not None and self.read is not None and isinstance(step, PartBegan):
            done += self.read.done
        ahead = sum(self.plan.prompts[step.part.number - 1 :]) if isinstance(step, PartBegan) else 0
        here = self.read.done if self.read is not None and isinstance(step, PartBegan) else 0
        if self.before and ahead:
            return (ahead - here) * now / max(1, done)
        return max(0.0, self.plan.seconds - now) if self.plan.seconds is not None else None
