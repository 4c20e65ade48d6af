"""Which rows of a table of combinations the short form runs: any three of the columns' values meet in one of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations
from random import Random

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
