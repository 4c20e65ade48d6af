"""Live view of a summary: points as they are checked, and below them the progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcli.api import Event as TurnEvent
from kvcli.api import Text, Thought
from kvcli.render.summarize.notes import hung, merge_done, part_done, stretch
from kvcli.render.terminal import terminal as f
from kvcli.render.terminal.screen import Screen
from kvcli.render.terminal.tables import clip
from kvcli.render.terminal.terminal import Span
from kvcli.render.turn.status_row import NARROWEST, RowOptions
from kvcli.render.turn.turn_summary import DOT
from kvcli.render.turn.turn_view import TurnView
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
from kvcli.summarize.plan import Plan
from kvcli.summarize.result import Point, Summary

if TYPE_CHECKING:
    from kvcli.summarize.ahead import Ahead

Writer = Callable[[Sequence["Point"]], str]


class SummaryView(TurnView):
    """A live summary. `writer` formats points for stdout as they are completed; None prints nothing before the end."""

    def __init__(
        self, screen: Screen, look: RowOptions, plan: Plan, writer: Writer | None, *, tells: bool = True
    ) -> None:
        super().__init__(screen, look)
        self.ahead: Ahead | None = None  # answers about other parts at the same time
        self.plan, self.writer, self.tells = plan, writer, tells and not screen.quiet
        self.summary: Summary | None = None
        self.stopped: Stopped | None = None
        self.step: PartBegan | MergeBegan | None = None
        self.points: list[Point] = []
        self.shown = ""  # text of the summary printed so far
        self.took: list[float] = []  # seconds of each part and merge that this run computed
        self.told: set[str] = set()  # notes that are not repeated at the end

    def on(self, event: Event | TurnEvent) -> None:
        """Process one event."""
        match event:
            case Text() | Thought() | Planned():  # a point is printed when it is complete and checked
                pass
            case PartBegan() | MergeBegan():
                self.step, self.stats, self.read = event, None, None
                self.started = self.screen.clock()
            case PartEnded() | MergeEnded():
                self._ended(event)
            case PointReady(point):
                self.points.append(point)
                self._write()
            case CacheWriteFailed(why):
                self.told.add(why)
                if self.tells:
                    self.screen.note(why)
            case Stopped():
                self.stopped, self.step = event, None
            case Done(summary):
                self.summary, self.step = summary, None
                self.turn = summary.turns[-1].turn
            case _:
                super().on(event)

    def _ended(self, event: PartEnded | MergeEnded) -> None:
        if self.step is not None and not self.step.is_cached:
            self.took.append(event.seconds)
        self.step = None
        if self.tells and len(self.plan.parts) > 1 and (self.region is None or self.screen.verbose):
            words = part_done(event) if isinstance(event, PartEnded) else merge_done(event)
            for line in hung(words, self.screen.err.width):
                self.screen.err.line((line, "dim"))
        for short in event.answered.turn.stats.shortages if self.tells and not event.answered.is_cached else ():
            self.screen.note(short)

    def _write(self) -> None:
        """Print the new text; the text of points only grows at its end."""
        if self.writer is None:
            return
        text = self.writer(self.points).rstrip("\n")
        new, self.shown = text[len(self.shown) :], text
        self._say(new)

    def _rows(self, width: int) -> list[list[Span]]:
        return [row for row in (self._head(width), *super()._rows(width)) if row]

    def _head(self, width: int) -> list[Span]:
        """Return `part 3 of 5 · pages 86–129 · 29,411 tokens · 2:10 left` if there are several parts."""
        step = self.step
        if step is None or self.screen.quiet or width < NARROWEST or len(self.plan.parts) < 2:
            return []
        if isinstance(step, PartBegan):
            at, words = step.part.number, [f"part {step.part.number} of {step.of}", stretch(step.part)]
        else:
            at, words = len(self.plan.parts) + step.number, [f"merge {step.number}", f"{step.n_points} points"]
        left = time_left(self.plan, at, self.took, self.screen.clock() - self.started)
        beside = self.ahead.n_running - 1 if self.ahead is not None else 0
        words += [f"{f.count(step.prompt)} tokens", f"{f.clock(left)} left" if left is not None else ""]
        words += [f"{beside} more at the same time" if beside > 0 else ""]
        return [(clip(" " + DOT.join(filter(None, words)), width - 2), "")]


def time_left(plan: Plan, at: int, took: Sequence[float], here: float) -> float | None:
    """Estimate the seconds for step `at`, counted from 1, and all later ones: parts first, then merges.

    `took` has the seconds of finished steps, which give the pace; without any, the plan's estimate does. `here` is the
    time in this step so far. The result is None if no pace is known, or if the time has exceeded the estimate.
    """
    steps = max(at, len(plan.parts) + plan.merges)
    if took:
        pace = sum(took) / len(took)
    elif plan.seconds is not None:
        pace = plan.seconds / steps
    else:
        return None
    left = pace * (steps - at + 1) - here
    return left if left > 0 else None
