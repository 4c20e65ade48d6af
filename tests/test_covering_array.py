"""What short forms leave out is no value of a column, nor any two or three values that some row has together."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests import covering as module
from tests.covering import covering, marked, pairs, spread

ROWS = [row for row in product(range(7), "abcde", range(3), "xy") if row[0] != 2 or row[1] in "ab"]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_what_columns_hold_in_a_row_they_hold_in_a_row_of_the_short_form(strength: int) -> None:
    short = covering(ROWS, strength)
    assert short <= {*ROWS}
    assert len(short) < (1, 10, 50, 130)[strength]
    for at in combinations(range(4), strength):
        assert {tuple(row[i] for i in at) for row in short} == {tuple(row[i] for i in at) for row in ROWS}


def test_the_long_form_has_every_row_and_the_same_ones_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WITH_SLOW", True)
    rows, again = pairs(ROWS), pairs(iter(ROWS))
    assert [row.values for row in rows] == ROWS
    assert [bool(row.marks) for row in rows] == [bool(row.marks) for row in again]
    assert {row.values for row in rows if not row.marks} == covering(ROWS, 2)


def test_rows_that_nobody_asks_for_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WITH_SLOW", False)
    short = covering(ROWS, 2)
    rows = marked(ROWS, short, core=[*short][:3])
    assert {row.values for row in rows} == short
    assert {row.values for row in rows if row.marks} == {*[*short][:3]}


def test_a_few_rows_differ_in_what_they_hold() -> None:
    rows = [(a, b) for a in "abcd" for b in "wxyz"]
    for n in (0, 1, 2, 4):
        few = spread(rows, n)
        assert [len({row[at] for row in few}) for at in (0, 1)] == [n, n]
    assert spread(rows[:2], 9) == {*rows[:2]}
