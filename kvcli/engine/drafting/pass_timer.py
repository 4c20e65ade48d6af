"""Pass times by row count, which decide how many draft tokens are worth verifying."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, median_low

# Kernels process rows in blocks, so pass times are a staircase. Row counts that round up to the same stair share times.
_STAIRS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 257)
_SLOPE = 0.03  # units per row, assumed for row counts that were never timed
_STALE = 1024  # passes after which the cost of a row count is forgotten
ABSURD = 0.6  # units; if a pass with draft tokens seems faster than this, the plain time is wrong
_STEADY = 1.33  # plain passes further apart than this factor are not comparable


class PassTimer:
    """Pass times by row count, in units of a plain pass, which has one row per sequence. Calibrated times serve until
    measured. Medians are used because times on a shared machine are noisy."""

    def __init__(self, n: int = 1) -> None:
        """`n`: sequences of a pass. With several, a row that was never timed is assumed to take half as long as one of
        theirs."""
        self._slope = _SLOPE if n == 1 else 0.5 / n
        self._now = 0  # passes
        self._plain: deque[float] = deque(maxlen=5)  # seconds
        self._units: dict[int, deque[float]] = {}  # stair -> units of passes on it
        self._medians: dict[int, float] = {}  # stair -> median, for stairs timed more than once
        self._timed: dict[int, int] = {}  # stair -> pass in which it was last timed
        self._prior: dict[int, float] = {}  # stair -> units from a calibration; used until the stair is timed
        # units of 1, 2, ... rows up to the largest known stair; empty = must be recomputed
        self._stairs: list[float] = []

    @property
    def plain(self) -> float:
        """Seconds of a pass with one row; 0 = not measured."""
        return median(self._plain) if self._plain else 0.0

    @property
    def measured(self) -> dict[int, float]:
        """Stair -> units. Of the first two passes the faster one counts, because the first includes preparation."""
        return dict(sorted(self._medians.items()))

    def expect(self, costs: Mapping[int, float]) -> None:
        """Set calibrated pass times: rows -> units."""
        self._prior = {_stair(rows): units for rows, units in costs.items() if rows > 1}
        self._stairs = []

    def tick(self) -> None:
        """Count a pass. Costs that were not measured for long are dropped: they may come from one bad moment."""
        self._now += 1
        for stair in [stair for stair, when in self._timed.items() if self._now - when > _STALE]:
            del self._units[stair], self._timed[stair]
            self._medians.pop(stair, None)
            self._stairs = []

    def agrees(self, seconds: float) -> bool:
        """True if the plain pass took about as long as the ones before."""
        return not self.plain or 1 / _STEADY < seconds / self.plain < _STEADY

    def time_plain(self, seconds: float) -> None:
        """Record the time of a plain pass."""
        self._plain.append(seconds)

    def time(self, rows: int, units: float) -> None:
        """Record that a pass of `rows` rows, more than one, took as long as `units` plain passes."""
        stair = _stair(rows)
        times = self._units.setdefault(stair, deque(maxlen=9))
        times.append(units)
        if len(times) > 1:
            self._medians[stair] = median_low(times)
        self._timed[stair] = self._now
        self._stairs = []

    def add(self, more: int, seconds: float) -> None:
        """Record a pass of several sequences with `more` rows than one of each."""
        self.tick()
        if not more:
            self.time_plain(seconds)
        elif self.plain and seconds < ABSURD * self.plain:
            self.forget_plain()
        elif self.plain:  # stairs of several sequences are level at best: the time is that of the end of the stair
            rows, units = more + 1, seconds / self.plain
            self.time(rows, 1 + (units - 1) * (_stair(rows) - 1) / more)

    def forget_plain(self) -> None:
        self._plain.clear()

    def costs(self, most: int) -> list[float]:
        """Return the units of passes with 1, 2, ... `most` rows, interpolated linearly between known stairs."""
        known = self._stairs = self._stairs or self._climb()
        return known[:most] + [known[-1] + self._slope * i for i in range(1, most - len(known) + 1)]

    def _climb(self) -> list[float]:
        measured, costs, least = [], [1.0], math.inf
        for stair, units in sorted((self._prior | self._medians).items(), reverse=True):
            least = max(1.0, min(least, units))  # fewer rows cannot take longer: a higher value is noise
            measured.append((stair, least))
        for stair, units in reversed(measured):
            step = (units - costs[-1]) / (stair - len(costs))
            costs += [costs[-1] + step * i for i in range(1, stair - len(costs) + 1)]
        return costs

    @property
    def reach(self) -> int:
        """Largest row count whose cost can be measured next: one stair above the stairs timed lately."""
        return _stair(max(self._medians, default=1) + 1)

    def knows(self, rows: int) -> bool:
        """True if passes of this many rows or more were timed lately."""
        return rows <= max(self._medians, default=1)

    def is_fading(self, rows: int) -> bool:
        """True if the cost of this many rows is unknown or will soon be dropped."""
        stair = _stair(rows)
        return stair > 1 and (len(self._units.get(stair, ())) < 2 or self._now - self._timed[stair] > _STALE // 4)


def _stair(rows: int) -> int:
    return next((stair for stair in _STAIRS if rows <= stair), rows)


@dataclass(frozen=True, slots=True)
class Company:
    """Sequences that share the passes of one that decodes, or prompt rows that do."""

    n: int  # sequences that decode in a pass, itself included
    timer: PassTimer | None  # times of passes with rows of so many; None = one sequence, beside prompt rows
