"""Triggers that decide when chunks are scored again."""

from __future__ import annotations

import math
from typing import Protocol

LEAST, MOST = 2, 32  # engine steps between two scorings
FALL = 0.15  # drop of the recent acceptance rate of first draft tokens below the long-term one
DOUBT = 0.5  # share of the average confidence below which the draft model counts as unsure
TRIED, WAITED = 3, 8  # scorings without effect, each watched for WAITED steps, after which only periodic ones remain


class Trigger(Protocol):
    """Trigger: observes every step and decides when the next scoring is due. The first one is due at once."""

    @property
    def is_near(self) -> bool:
        """True if a scoring may be due after the coming step."""

    @property
    def is_due(self) -> bool: ...

    def think(self, sure: float) -> None:
        """Record the draft model's probability of the coming step's first draft token."""

    def hear(self, was_right: bool | None) -> None:
        """Record if the first draft token of a finished step was accepted; None = there was none."""

    def looked(self) -> None:
        """Record that chunks were scored."""


class Every:
    """Trigger with a fixed number of steps between scorings."""

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
    """Trigger that is due when acceptance drops or the draft model is unsure, and periodically in any case.

    SpecExtend announces an adaptive trigger without a description. In its tables a fixed period of 4 or 128 rounds
    differs by a hundredth, so this trigger reacts to sudden drops only.
    """

    def __init__(self) -> None:
        self._since = math.inf
        self._short = self._long = self._sure = 0.0
        self._heard = 0  # steps with a draft token
        self._misses = 0  # in a row
        self._is_lost = False
        self._before, self._rose = 0.0, True  # acceptance at the last scoring; was it higher since?
        self._vain = 0  # scorings in a row that were triggered and changed nothing

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
        self._rose = self._since >= MOST  # a periodic scoring was not triggered, so it cannot fail
        self._since, self._before, self._misses, self._is_lost = 0, self._short, 0, False


def trigger(setting: str) -> Trigger:
    """Return the trigger of the setting `spec.retrieval`."""
    return Adaptive() if setting == "adaptive" else Every(int(setting.partition(":")[2]))
