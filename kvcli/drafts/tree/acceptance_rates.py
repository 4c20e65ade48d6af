"""How often guesses of one kind came true; old evidence fades."""

from __future__ import annotations

from collections.abc import Sequence

from kvcli.engine.drafting.report import AcceptanceByMatch


class AcceptanceRates:
    """Acceptance by cell. A cell starts at a given value, worth a few guesses, and moves with what is learned."""

    _DECAY = 0.98  # per guess: the last 50 or so count
    _PRIOR = 2.0  # guesses that the starting values are worth
    _MOST = 0.98  # nothing is certain

    def __init__(self, start: Sequence[Sequence[float]], names: Sequence[str]) -> None:
        """`start[row][column]`: share of guesses that came true elsewhere; `names[row]` for people."""
        self._true = [[p * self._PRIOR for p in row] for row in start]
        self._seen = [[self._PRIOR for _ in row] for row in start]
        self._names = names
        self._tally = [[0, 0] for _ in start]  # first choices: right, made

    def chance(self, row: int, column: int) -> float:
        """Probability that a guess of this cell is right, once multiplied by its share of the weight."""
        return min(self._MOST, self._true[row][column] / self._seen[row][column])

    def learn(self, row: int, column: int, was_right: bool, share: float = 1.0, *, is_first: bool = True) -> None:
        """One guess was decided. `share`: the part of the weight it had, so that it counts for that much."""
        self._true[row][column] = self._DECAY * self._true[row][column] + was_right
        self._seen[row][column] = self._DECAY * self._seen[row][column] + share
        if is_first:
            self._tally[row][0] += was_right
            self._tally[row][1] += 1

    def record(self) -> tuple[AcceptanceByMatch, ...]:
        """The record of first choices, by row."""
        return tuple(
            AcceptanceByMatch(name, made, right / made if made else 0.0)
            for name, (right, made) in zip(self._names, self._tally, strict=True)
        )


def by_bits(value: int, most: int) -> int:
    """0 for 1, 1 for 2-3, 2 for 4-7, ...; at most `most`."""
    return min(value.bit_length() - 1, most)
