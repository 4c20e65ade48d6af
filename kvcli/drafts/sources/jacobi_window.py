"""The Jacobi window: scout rows that guess several places ahead at once and become n-grams pass by pass.

Lookahead Decoding (Fu et al., arXiv 2402.02057). `levels` x `width` tokens; level l of column i stands l + i places
behind the pending token, which is the corner (0, 0) and no scout. A scout sees the top level up to its column, and its
own column above it. The last level's predictions complete one n-gram a column and become the new last level; the rest
moves up. The window advances one place a pass, however many tokens were accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import product
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.rows import LookaheadRows


class JacobiWindow:
    """Tokens of the scouts, and what becomes of them."""

    def __init__(self, width: int, ngram: int, ends: Collection[int] = ()) -> None:
        self.width, self.levels = width, ngram - 1
        self._ends = frozenset(ends)  # an end token in the window would only breed more of them
        self._text: Sequence[int] = ()  # where fillers are taken from
        self._random = Random(0)
        self._tokens: list[list[int]] = []  # [levels][width]; the corner is the pending token's and not read
        self._age = 0  # passes since it was filled
        places = [(level, column) for level, column in product(range(self.levels), range(width)) if level or column]
        self._offset = [level + column for level, column in places]
        self._order = places
        self._last = [i for i, (level, _) in enumerate(places) if level == self.levels - 1]
        self._sees: Tensor | None = None  # [F, F] bool, always the same

    @property
    def rows(self) -> int:
        """Scouts in a pass."""
        return len(self._order)

    @property
    def reach(self) -> int:
        """Places behind the pending token that the farthest scout stands at."""
        return max(self._offset, default=0)

    def start(self, ids: Sequence[int]) -> None:
        """Fill all levels from the text, as if by chance but always alike."""
        self._text = [t for t in ids[-4096:] if t not in self._ends]
        self._random = Random(len(ids))
        self._tokens = [[self._filler() for _ in range(self.width)] for _ in range(self.levels)] if self._text else []
        self._age = 0

    def scouts(self) -> LookaheadRows | None:
        """The rows of this pass; None while there is no text to fill them from."""
        import torch

        from kvcli.engine.rows import LookaheadRows

        if not self._tokens:
            return None
        if self._sees is None:
            sees = [[_sees(a, b) for b in self._order] for a in self._order]
            self._sees = torch.tensor(sees, dtype=torch.bool)
        ids = [self._tokens[level][column] for level, column in self._order]
        return LookaheadRows(ids, self._offset, self._sees, self._last)

    def harvest(self, before: Sequence[int], last: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Roll on by one place. `before` is the text up to the pending token, `last` what each column of the last
        level predicts. Yields (what the run follows, run), once every level has been predicted and not filled."""
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
    """Does the scout at (level, column) `a` see the one at `b`?"""
    if b[0] == 0:
        return b[1] <= a[1]
    return b[1] == a[1] and b[0] <= a[0]
