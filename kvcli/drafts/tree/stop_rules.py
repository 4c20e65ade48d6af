"""When a second model has guessed enough: rules that stop sooner than the marginal one of draft_controller.py, never
later.

SpecDec++ (Huang et al., arXiv 2405.19715) stops once a rejection among all guesses is likelier than a bound; DISCO
(Mamou et al., arXiv 2405.04304) has a classifier judge each guess by itself. Theirs were trained beforehand. Here the
first takes its chances from the record of such guesses, and the second is fitted while decoding. Only guesses whose
parents were taken teach: what lies behind a rejection was never tested, and says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Literal, Protocol

Rule = Literal["marginal", "reject", "disco"]
_RATE = 0.05  # of learning, a guess


class StopRule(Protocol):
    """Asked behind each guess."""

    def goes_on(self, chances: Sequence[float]) -> bool:
        """Is another guess to be made behind some with these chances of being taken, the ones before them included?"""

    def learn(self, chances: Sequence[float], was_right: bool) -> None:
        """All of them but the last were taken; was that?"""


def rule(name: Rule, risk: float) -> StopRule | None:
    """None = the marginal rule alone."""
    if name == "marginal":
        return None
    return Reject(risk) if name == "reject" else Disco(risk)


class Reject:
    """Until one of all guesses is rejected with probability `risk` (SpecDec++)."""

    def __init__(self, risk: float) -> None:
        self._risk = risk

    def goes_on(self, chances: Sequence[float]) -> bool:
        return 1 - chances[-1] <= self._risk

    def learn(self, chances: Sequence[float], was_right: bool) -> None:
        """The record that chances come from has heard of it."""


class Disco:
    """Until the newest guess is rejected with probability `risk`, by a logistic regression (DISCO)."""

    def __init__(self, risk: float) -> None:
        self._risk = risk
        self._weights = [0.0, 1.0, 0.0, 0.0]  # at first what the record says of such a guess

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
    """A constant, log odds of the newest guess by itself and of all, and how deep it is."""
    alone = chances[-1] / chances[-2] if len(chances) > 1 else chances[-1]
    return 1.0, _odds(alone), _odds(chances[-1]), len(chances) / 8


def _odds(chance: float) -> float:
    chance = max(0.001, min(0.999, chance))
    return log(chance / (1 - chance))
