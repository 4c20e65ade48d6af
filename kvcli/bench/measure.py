"""Timed runs of sides on prompts: repetitions are interleaved and every sample is recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcli.errors import KvcliError

if TYPE_CHECKING:
    from kvcli.bench.side import Side, TimedSample


log = logging.getLogger("kvcli.bench")


@dataclass(frozen=True)
class Case:
    """A prompt to be continued by every side."""

    ctx: int
    workload: str
    prompt: tuple[int, ...]
    new: int


@dataclass(frozen=True)
class RunSchedule:
    """Number and order of runs."""

    reps: int
    warmup: int
    interleave: bool = True

    def order(self, n_sides: int) -> Iterator[tuple[bool, int]]:
        """(is a warm-up, side) of every run. Interleaved, each repetition begins with another side."""
        rounds = [(True, r) for r in range(self.warmup)] + [(False, r) for r in range(self.reps)]
        if not self.interleave:
            yield from ((is_warmup, side) for side in range(n_sides) for is_warmup, _ in rounds)
            return
        for is_warmup, r in rounds:
            yield from ((is_warmup, (r + i) % n_sides) for i in range(n_sides))


@dataclass
class Series:
    """Samples of one side on one case."""

    side: str
    case: Case
    samples: list[TimedSample] = field(default_factory=list)  # in the order they ran, without warm-ups
    error: str | None = None  # why it stopped
    peak: int | None = None  # bytes


Tell = Callable[[int, int, str], None]  # runs done, of how many (0 = unknown), and the current one


def measure(sides: Sequence[Side], cases: Sequence[Case], plan: RunSchedule, into: list[Series], tell: Tell) -> None:
    """Append a series for each case and side to `into`, filled while running: an interruption loses no sample."""
    rounds = (plan.warmup + plan.reps) * len(sides)
    for n, case in enumerate(cases):
        series = [Series(side.name, case) for side in sides]
        into += series
        for i, (is_warmup, at) in enumerate(plan.order(len(sides))):
            words = f"{sides[at].name} · {case.workload} {case.ctx:,}" + (" · warm-up" if is_warmup else "")
            tell(n * rounds + i, rounds * len(cases), words)
            if series[at].error is None:
                _once(sides[at], series[at], keep=not is_warmup)
    tell(rounds * len(cases), rounds * len(cases), "measured")


def words_of(error: Exception) -> str:
    """Message of an error in one line; the log gets the rest."""
    log.warning("a part of the benchmark failed", exc_info=error)
    if isinstance(error, KvcliError):
        return "; ".join([error.message, *error.lines])
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _once(side: Side, series: Series, *, keep: bool) -> None:
    """Run a side once. The error of a failing side is recorded in its series, and the other sides continue."""
    case = series.case
    try:
        sample = side.run(case.prompt, case.new)
    except Exception as error:  # another program may fail in any way; the other sides' samples are kept
        series.error = words_of(error)
        return
    if len(sample.ids) != case.new or len(sample.at) != case.new * sample.batch:
        series.error = f"wrote {len(sample.ids)} of {case.new} tokens"
    elif keep:
        series.samples.append(sample)
