"""Which rows of a table of combinations the short form runs: any two or three columns' values meet in one of them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import combinations
from random import Random
from typing import Any

import pytest

Row = tuple[Hashable, ...]


def covering(rows: Sequence[Row], strength: int = 3) -> set[Row]:
    """Some of `rows`, few: what any `strength` columns hold in a row, they hold in one of these. The same each time."""
    order, seen, found = list(rows), set[Row](), set[Row]()
    Random(1).shuffle(order)  # as they stand, neighbours share most of what they hold
    columns = list(combinations(range(len(order[0])), strength))
    for new in range(len(columns), 0, -1):  # those that bring most first
        for row in order:
            holds = {(at, *(row[i] for i in at)) for at in columns}
            if len(holds - seen) >= new:
                seen |= holds
                found.add(row)
    return found


def marked(rows: Sequence[Row], short: Collection[Row]) -> list[Any]:
    """All rows for `parametrize`, `slow` those that are not in the short form."""
    return [pytest.param(*row, marks=[] if row in short else [pytest.mark.slow]) for row in rows]


def pairs(rows: Iterable[Row]) -> list[Any]:
    """All rows, of which the short form runs some in which any two columns meet.

    For what tests/exact holds three of to each other: storages, policies and drafters.
    """
    every = list(rows)
    return marked(every, covering(every, 2))
