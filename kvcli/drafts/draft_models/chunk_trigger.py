"""When it is time to look again at what a text is about."""

from __future__ import annotations

import math
from typing import Protocol

LEAST, MOST = 2, 32  # rounds between two looks
FALL = 0.15  # of the share of first guesses that come true lately, below that of long ago
DOUBT = 0.5  # of how sure it is on average, below which it is at a loss
TRIED, WAITED = 3, 8  # looks without an effect, each awaited for so many rounds, after which it only looks now and then


class Trigger(Protocol):
    """Hears of every round and says when the next look is due. The first is due at once."""

    @property
    def is_near(self) -> bool:
        """May one be due behind the coming round?"""

    @property
    def is_due(self) -> bool: ...

    def think(self, sure: float) -> None:
        """How likely the first guess of the coming round is, by who guesses."""

    def hear(self, was_right: bool | None) -> None:
        """A round is over. Did its first guess come true? None = there was none."""

    def looked(self) -> None:
        """A look was taken."""


class Every:
    """Always after so many rounds."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._since = rounds, math.inf

    @property
    def is_near(self) -> bool:
        return self._since + 1 >= self._rounds

    @property
    def is_due(self) -> bool:
        return self._since >= self._rounds

    def think(self, sure: float) -> None:
        return

    def hear(self, was_right: bool | None) -> None:
        self._since += 1

    def looked(self) -> None:
        self._since = 0


class Adaptive:
    """Where guesses fail that came true before, or whoever guesses is at a loss; now and then in any case.

    SpecExtend announces an adaptive trigger and does not say which. A fixed period of 4 or 128 rounds makes a hundredth
    of difference in its tables, so this one waits for jumps.
    """

    def __init__(self) -> None:
        self._since = math.inf
        self._short = self._long = self._sure = 0.0
        self._heard = 0  # rounds with a guess
        self._misses = 0  # in a row
        self._is_lost = False
        self._before, self._rose = 0.0, True  # what came true when the last look was taken, and was there more since?
        self._vain = 0  # looks in a row that were asked for and changed nothing

    @property
    def is_near(self) -> bool:
        return self._since + 1 >= LEAST

    @property
    def is_due(self) -> bool:
        if self._since >= MOST:
            return True
        if self._since < LEAST or self._vain >= TRIED:
            return False
        return self._is_lost or self._misses >= 2 or self._short < self._long - FALL

    def think(self, sure: float) -> None:
        self._is_lost = sure < DOUBT * self._sure
        self._sure = 0.9 * self._sure + 0.1 * sure if self._sure else sure

    def hear(self, was_right: bool | None) -> None:
        self._since += 1
        if was_right is None:
            return
        if not self._heard:
            self._short = self._long = float(was_right)
        self._heard += 1
        self._short, self._long = 0.7 * self._short + 0.3 * was_right, 0.97 * self._long + 0.03 * was_right
        self._misses = 0 if was_right else self._misses + 1
        self._rose |= self._since <= WAITED and self._short > self._before

    def looked(self) -> None:
        self._vain = 0 if self._rose else self._vain + 1
        self._rose = self._since >= MOST  # nobody asked for this one
        self._since, self._before, self._misses, self._is_lost = 0, self._short, 0, False


def trigger(setting: str) -> Trigger:
    """Of the setting `retrieval`."""
    return Adaptive() if setting == "adaptive" else Every(int(setting.partition(":")[2]))
