"""Rules that stop a draft sooner than the marginal one of draft_controller.py, never later.

SpecDec++ (Huang et al., arXiv 2405.19715) stops once the probability of a rejection among all draft tokens exceeds a
bound. DISCO (Mamou et al., arXiv 2405.04304) has a classifier judge each draft token by itself. The papers train their
classifiers beforehand. Here the first rule takes its chances from the measured acceptance rates, and the second is
fitted while decoding. Only draft tokens whose parents were accepted are learned from, because the others were never
tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Literal, Protocol

Rule = Literal["marginal", "reject", "disco"]
_RATE = 0.05  # learning rate, per draft token


class StopRule(Protocol):
    """Rule that is asked after each draft token."""

    def goes_on(self, chances: Sequence[float]) -> bool:
        """True if another draft token may follow tokens whose cumulative chances of acceptance are `chances`."""

    def learn(self, chances: Sequence[float], was_right: bool) -> None:
        """Record if the last of these tokens was accepted; all before it were."""


def rule(name: Rule, risk: float) -> StopRule | None:
    """Return the stop rule of this name; None = the marginal rule alone."""
    if name == "marginal":
        return None
    return Reject(risk) if name == "reject" else Disco(risk)


class Reject:
    """Stop rule: stops when one of all draft tokens is rejected with a probability above `risk` (SpecDec++)."""

    def __init__(self, risk: float) -> None:
        self._risk = risk

    def goes_on(self, chances: Sequence[float]) -> bool:
        return 1 - chances[-1] <= self._risk

    def learn(self, chances: Sequence[float], was_right: bool) -> None:
        """Record no further data: the acceptance rates behind `chances` are already updated."""


class Disco:
    """Stop rule: stops when the newest token's chance of rejection exceeds `risk`, by logistic regression (DISCO)."""

    def __init__(self, risk: float) -> None:
        self._risk = risk
        self._weights = [0.0, 1.0, 0.0, 0.0]  # start: the log odds of the measured chance

    def goes_on(self, chances: Sequence[float]) -> bool:
        return 1 - self._chance(_features(chances)) <= self._risk

    def learn(self, chances: Sequence[float], was_right: bool) -> None:
        features = _features(chances)
        by = _RATE * (was_right - self._chance(features))
        self._weights = [w + by * x for w, x in zip(self._weights, features, strict=True)]

    def _chance(self, features: Sequence[float]) -> float:
        score = sum([w * x for w, x in zip(self._weights, features, strict=True)])
        return 1 / (1 + exp(-max(-30.0, min(30.0, score))))


def _features(chances: Sequence[float]) -> tuple[float, float, float, float]:
    """Return a constant, the log odds of the newest draft token alone and of the whole path, and the depth."""
    alone = chances[-1] / chances[-2] if len(chances) > 1 else chances[-1]
    return 1.0, _odds(alone), _odds(chances[-1]), len(chances) / 8


def _odds(chance: float) -> float:
    chance = max(0.001, min(0.999, chance))
    return log(chance / (1 - chance))
