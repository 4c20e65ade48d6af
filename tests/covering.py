"""Which rows of a table of combinations the short form runs: any two or three columns' values meet in one of them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import combinations
from random import Random
from typing import Any

import pytest

Row = tuple[Hashable, ...]
WITH_SLOW = True  # whether `-m` may ask for rows beyond the short form; tests/conftest.py sets it


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


def spread(rows: Iterable[tuple[str, ...]], n: int) -> set[tuple[str, ...]]:
    """At most n of `rows`, each with most of what the ones before it do not hold. The same each time."""
    order, seen, chosen = sorted(rows), set[tuple[int, str]](), set[tuple[str, ...]]()
    Random(1).shuffle(order)
    while order and len(chosen) < n:
        best = max(order, key=lambda row: len({*enumerate(row)} - seen))
        order.remove(best)
        seen |= {*enumerate(best)}
        chosen.add(best)
    return chosen


def marked(rows: Sequence[Row], short: Collection[Row], core: Collection[Row] = ()) -> list[Any]:
    """The rows for `parametrize`: of the short form, some marked `core`; and the others, `slow`, if asked for."""
    return [
        pytest.param(*row, marks=[pytest.mark.core] if row in core else [] if row in short else [pytest.mark.slow])
        for row in rows
        if WITH_SLOW or row in short
    ]


def pinned(rows: Iterable[Row], *core: Row) -> list[Any]:
    """All rows for `parametrize`, these marked `core`: a fault was seen that they notice and most others do not."""
    every = list(rows)
    assert set(core) <= set(every)
    return marked(every, every, core)


def pairs(rows: Iterable[Row]) -> list[Any]:
    """All rows, of which the short form runs some in which any two columns meet.

    For what tests/exact holds three of to each other: storages, policies and drafters.
    """
    every = list(rows)
    return marked(every, covering(every, 2))
