"""Numbers of a claim and of a page: one amount in two spellings is confirmed, another amount never is."""

from __future__ import annotations

import pytest

from kvcli.summarize.check import Checker, Passage
from kvcli.summarize.citations import Place
from kvcli.summarize.claim_words import units, words
from kvcli.summarize.units import heads

TEXT = "The patients of the trial at Stultov got {} each morning, as Adler said. Nothing else was given."


def is_confirmed(page: str, claim: str) -> bool:
    """Of two sentences, or of those about the trial where these are only amounts."""
    place = Place("page", "1")
    (cite,) = Checker([Passage(place, page)]).judge(claim, [place])
    return cite.confirmed


def is_one(page: str, claim: str) -> bool:
    return is_confirmed(TEXT.format(page), TEXT.partition(",")[0].format(claim))


SAME = [
    ("3.5 g", "3,5 g"),
    (".5 mg", "0.5 mg"),
    ("12.0", "12"),
    ("12.50", "12.5"),
    ("0.125 mg", "0,125 mg"),
    ("10 000 units", "10,000 units"),
    ("10\u00a0000 units", "10,000 units"),
    ("10\u202f000 units", "10 000 units"),
    ("10'000 units", "10000 units"),
    ("1 234 567", "1.234.567"),
    ("1,234.50", "1 234,5"),
    ("1,234", "1234"),
    ("one million", "1,000,000"),
    ("a hundred", "100"),
    ("one hundred thousand", "100,000"),
    ("half a million", "500,000"),
    ("twenty-five", "25"),
    ("1.25 million", "1,250,000"),
    ("$1.2M", "$1.2 million"),
    ("$1.2 m", "$1.2 million"),
    ("£5bn", "£5 billion"),
    ("5k", "5,000"),
    ("300K", "300,000"),
    ("7B", "7 billion"),
    ("5mg", "5 mg"),
    ("5 mg", "5mg"),
    ("12%", "12 percent"),
    ("12 %", "12 per cent"),
    ("12 %", "12"),
    ("5 m", "5 metres"),
    ("5m", "5 m"),
    ("5 hours", "5 h"),
    ("$5", "5 dollars"),
    ("5 €", "€5"),
    ("US$5", "USD 5"),
    ("EUR 5 million", "€5m"),
    ("5 percentage points", "5 percentage point"),
    ("10⁶ cells", "10^6 cells"),
    ("10⁻⁶", "10^-6"),
    ("-5", "\u22125"),
    ("$-5", "-$5"),
    ("5-metre", "5 m"),
    ("1990s", "1990s"),
    ("K482", "K482"),
]
OTHER = [
    ("5m", "5,000,000"),
    ("5m", "5 million"),
    (".5 mg", "5 mg"),
    ("0.5 mg", "5 mg"),
    ("125 mg", "0.125 mg"),
    ("10 000 units", "10 units"),
    ("10\u00a0000 units", "10 units"),
    ("10\u202f000 units", "10 units"),
    ("10⁶ cells", "106 cells"),
    ("10⁶ cells", "10 cells"),
    ("10⁻⁶ cells", "10 cells"),
    ("10^6 cells", "6 cells"),
    ("x10⁶", "x106"),
    ("$5", "€5"),
    ("5 dollars", "5 euros"),
    ("5 %", "5 percentage points"),
    ("5 percentage points", "5 %"),
    ("5 %", "5 ppm"),
    ("5 ml", "5 cl"),
    ("5 mg", "5 g"),
    ("125 mg", "125 kg"),
    ("5 mW", "5 MW"),
    ("5 million", "5 billion"),
    ("5 million", "5"),
    ("$1.2M", "$1.2"),
    ("300K", "300"),
    ("7B", "7"),
    ("5k", "5"),
    ("half a million", "1 million"),
    ("5", "-5"),
    ("thirty", "twenty"),
    ("twenty-one", "20"),
    ("1990s", "1990"),
    ("1.2.3", "1.2"),
    ("K482", "482"),
]


@pytest.mark.parametrize(("page", "claim"), SAME)
def test_one_amount_in_two_spellings(page: str, claim: str):
    assert is_one(page, claim)


@pytest.mark.parametrize(("page", "claim"), OTHER)
def test_another_amount(page: str, claim: str):
    assert not is_one(page, claim)


TABLE = "Share of the plants\n\nPlant (%)\nLyon 12 340 7\nTurin 14\n\nIt employed 340 people and 15\nguards at Genoa."


@pytest.mark.parametrize(
    ("claim", "is_true"),
    [
        ("Plant Lyon: 12 %", True),
        ("Plant Turin: 14 percent", True),
        ("Plant Lyon: 340", True),
        ("Plant Lyon: 12 mg", False),
        ("Plant Lyon: 13 %", False),
        ("It employed 340 % people at Genoa", False),
        ("It employed 15 % guards at Genoa", False),
    ],
)
def test_the_head_of_a_column_gives_its_numbers_a_unit(claim: str, is_true: bool):
    assert is_confirmed(TABLE, claim) == is_true


def test_units_behind_numbers_are_no_heads():
    assert heads("It grew by 12 % (5 mg) in 12    % of cases, (not here) [p. 3]") == frozenset()
    assert heads("Dose (in mg) | kg | Share %\n") == {"mg", "kg", "%"}


@pytest.mark.parametrize(
    "unit",
    ["7", "7.", "7.7,", "777 ", "2027 777 777 ", "$", "-7", "7 million ", "half a ", "7⁶", "7mg", " ", "7\t", "in (mg"],
)
def test_long_rows_are_read(unit: str):
    """Where a pattern takes squares, this never ends."""
    row = unit * (100_000 // len(unit))
    for text in (row, f"{row}x"):
        keys = {word.key for word in words(text)}
        assert set().union(*(u.keys for u in units(text)), frozenset()) >= keys
