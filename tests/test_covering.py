"""What short forms leave out is no value of a column, nor any two or three values that some row has together."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import covering, pairs

ROWS = [row for row in product(range(7), "abcde", range(3), "xy") if row[0] != 2 or row[1] in "ab"]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_what_columns_hold_in_a_row_they_hold_in_a_row_of_the_short_form(strength: int) -> None:
    short = covering(ROWS, strength)
    assert short <= {*ROWS}
    assert len(short) < (1, 10, 50, 130)[strength]
    for at in combinations(range(4), strength):
        assert {tuple(row[i] for i in at) for row in short} == {tuple(row[i] for i in at) for row in ROWS}


def test_the_long_form_has_every_row_and_the_same_ones_each_time() -> None:
    rows, again = pairs(ROWS), pairs(iter(ROWS))
    assert [row.values for row in rows] == ROWS
    assert [bool(row.marks) for row in rows] == [bool(row.marks) for row in again]
    assert {row.values for row in rows if not row.marks} == covering(ROWS, 2)
