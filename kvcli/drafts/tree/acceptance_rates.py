"""Acceptance rates of draft tokens by kind; old evidence fades."""

from __future__ import annotations

from collections.abc import Sequence

from kvcli.engine.drafting.report import AcceptanceByMatch


class AcceptanceRates:
    """Acceptance rates by cell. A cell starts at a given rate, which counts as a few draft tokens."""

    _DECAY = 0.98  # per draft token: about the last 50 count
    _PRIOR = 2.0  # draft tokens that the starting rates count as
    _MOST = 0.98  # upper limit of a rate

    def __init__(self, start: Sequence[Sequence[float]], names: Sequence[str]) -> None:
        """`start[row][column]`: acceptance rate measured elsewhere; `names[row]` for reports."""
        self._true = [[p * self._PRIOR for p in row] for row in start]
        self._seen = [[self._PRIOR for _ in row] for row in start]
        self._names = names
        self._tally = [[0, 0] for _ in start]  # first choices: accepted, drafted

    def chance(self, row: int, column: int) -> float:
        """Return the acceptance rate of this cell, to be multiplied by a candidate's share of the weight."""
        return min(self._MOST, self._true[row][column] / self._seen[row][column])

    def learn(self, row: int, column: int, was_right: bool, share: float = 1.0, *, is_first: bool = True) -> None:
        """Record one verified draft token. `share`: its part of the weight; the token counts for that much."""
        self._true[row][column] = self._DECAY * self._true[row][column] + was_right
        self._seen[row][column] = self._DECAY * self._seen[row][column] + share
        if is_first:
            self._tally[row][0] += was_right
            self._tally[row][1] += 1

    def record(self) -> tuple[AcceptanceByMatch, ...]:
        """Return the acceptance rates of first choices, by row."""
        return tuple(
            AcceptanceByMatch(name, made, right / made if made else 0.0)
            for name, (right, made) in zip(self._names, self._tally, strict=True)
        )


def by_bits(value: int, most: int) -> int:
    """Return 0 for 1, 1 for 2-3, 2 for 4-7, ...; at most `most`."""
    return min(value.bit_length() - 1, most)
