"""The Jacobi window: lookahead rows that predict several positions ahead and become n-grams pass by pass.

Lookahead Decoding (Fu et al., arXiv 2402.02057). The window has `levels` x `width` tokens; level l of column i is l+i
positions after the pending token, which is the corner (0, 0) and no lookahead row. A lookahead row attends to the top
level up to its column, and to the levels of its column up to its level. The predictions of the last level complete
one n-gram per column and become the new last level; the other levels move up. The window advances one position a pass,
however many tokens were accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import product
from random import Random

import torch
from torch import Tensor

from kvcli.engine.forward_request import LookaheadRows


class JacobiWindow:
    """Jacobi window: the tokens of the lookahead rows, and the n-grams they complete."""

    def __init__(self, width: int, ngram: int, ends: Collection[int] = ()) -> None:
        self.width, self.levels = width, ngram - 1
        self._ends = frozenset(ends)  # an end token in the window would only produce more of them
        self._text: Sequence[int] = ()  # source of filler tokens
        self._random = Random(0)
        self._tokens: list[list[int]] = []  # [levels][width]; the corner is the pending token's and not used
        self._age = 0  # passes since the window was filled
        self._order = [place for place in product(range(self.levels), range(width)) if any(place)]  # level, column
        self._offset = [level + column for level, column in self._order]
        self._last = [i for i, (level, _) in enumerate(self._order) if level == self.levels - 1]
        self._sees: Tensor | None = None  # [F, F] bool, constant

    @property
    def rows(self) -> int:
        """Number of lookahead rows in a pass."""
        return len(self._order)

    @property
    def reach(self) -> int:
        """Distance from the pending token to the farthest lookahead row, in positions."""
        return max(self._offset, default=0)

    def start(self, ids: Sequence[int]) -> None:
        """Fill all levels with random tokens of the sequence, reproducibly: the random seed is its length."""
        self._text = [t for t in ids[-4096:] if t not in self._ends]
        self._random = Random(len(ids))
        self._tokens = [[self._filler() for _ in range(self.width)] for _ in range(self.levels)] if self._text else []
        self._age = 0

    def lookahead_rows(self) -> LookaheadRows | None:
        """Return the lookahead rows of this pass; None while no tokens exist to fill them with."""
        if not self._tokens:
            return None
        if self._sees is None:
            sees = [[_sees(a, b) for b in self._order] for a in self._order]
            self._sees = torch.tensor(sees, dtype=torch.bool)
        ids = [self._tokens[level][column] for level, column in self._order]
        return LookaheadRows(ids, self._offset, self._sees, self._last)

    def harvest(self, before: Sequence[int], last: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Advance the window by one position. `before` is the sequence up to the pending token, `last` holds the
        prediction of each column of the last level. Yields (tokens before the n-gram, n-gram) once every level holds
        predictions and no filler."""
        rows, top = self._tokens, self._tokens[0]
        if self._age >= self.levels - 1:
            for i in range(self.width):
                yield [*before, *top[1 : i + 1]], [*(level[i] for level in rows[1:]), last[i]]
        new = [self._filler() if token in self._ends else token for token in last]
        self._tokens = [*rows[1:], new]
        self._age += 1

    def _filler(self) -> int:
        return self._random.choice(self._text)


def _sees(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """True if the lookahead row at (level, column) `a` attends to the one at `b`."""
    return b[1] <= a[1] if b[0] == 0 else b[1] == a[1] and b[0] <= a[0]
