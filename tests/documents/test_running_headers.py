"""What goes from the edges of a page as running, and what only looks like it."""

from __future__ import annotations

import io
from random import Random

import pytest

from kvcli.documents.document import ParseJob
from kvcli.documents.worker import parse
from tests.documents import made


def texts(data: bytes) -> list[str]:
    return [section.text for section in parse(io.BytesIO(data), ParseJob("made", "pdf")).sections]


def first_and_last(data: bytes) -> list[tuple[str, str]]:
    return [(lines[0], lines[-1]) for lines in (text.split("\n") for text in texts(data))]


def headed(line: str, size: float, *, distance: float = 50, at_foot: bool = False, n_pages: int = 5) -> bytes:
    """Pages of prose, each with such a line above or below it."""
    rng, sheet = Random(5), made.Sheet()
    for n in range(1, n_pages + 1):
        y = 720.0
        if not at_foot:
            sheet.lines([said(line, n)], y=y + distance, size=size)
        y = sheet.lines([made.prose(rng, 7) for _ in range(9)] + [made.prose(rng, 3)], y=y)
        if at_foot:
            sheet.lines([said(line, n)], y=y + 14.3 - distance, size=size)
        sheet.page()
    return sheet.save()


def said(line: str, n: int) -> str:
    """The line as it is on page n: `#` the page, `^` in Roman numerals, `@` a year that counts with it."""
    return line.replace("#", str(n)).replace("@", str(1900 + n)).replace("^", "i" * n)


@pytest.mark.parametrize("at_foot", [False, True])
@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("Chapter #", 24),
        ("Chapter #", 11),
        ("Lesson #", 10),
        ("Question # of 5", 24),
        ("@", 24),
        ("@", 14),
        ("#", 24),
        ("Exhibit A-#", 11),
    ],
)
def test_headings_that_count_with_the_pages_stay(line, size, at_foot):
    found = first_and_last(headed(line, size, at_foot=at_foot))
    assert [ends[at_foot] for ends in found] == [said(line, n) for n in range(1, 6)]


@pytest.mark.parametrize("at_foot", [False, True])
@pytest.mark.parametrize(
    ("line", "size", "distance"),
    [
        ("#", 9, 50),
        ("#", 11, 50),
        ("#", 11, 14.3),
        ("- # -", 9, 50),
        ("^", 9, 50),
        ("Page # of 5", 9, 50),
        ("p. #", 9, 50),
        ("Report 2020 - #", 9, 50),
        ("Report 2020 | Page # of 5", 9, 50),
        ("Report 2020, page #", 9, 50),
        ("# | Report of the board", 9, 50),
        ("River board #", 9, 50),
        ("@", 9, 50),  # the pages of a volume
        ("Report of the board", 9, 50),
    ],
)
def test_numbers_of_pages_go(line, size, distance, at_foot):
    assert texts(headed(line, size, distance=distance, at_foot=at_foot)) == texts(headed("", size))


@pytest.mark.parametrize("at_foot", [False, True])
@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("Annual Report 2024 #", 11),
        ("# Annual Report", 11),
        ("ACME Corp #", 11),
        ("ACME Corp #", 10),
        ("(c) 2024 ACME Corp. All rights reserved. #", 11),
        ("Slide #", 11),
        ("Page # of 8", 11),
        ("Report 2020 - #", 11),
        ("Sheet #", 11),
        ("Blad # van 8", 11),
    ],
)
def test_titles_beside_the_number_of_a_page_go_from_a_longer_file(line, size, at_foot):
    found = texts(headed(line, size, distance=30, at_foot=at_foot, n_pages=8))
    assert found == texts(headed("", size, n_pages=8))


@pytest.mark.parametrize(
    ("line", "size", "n_pages"),
    [
        ("Annual Report #", 24, 8),
        ("Annual Report #", 11, 5),  # or an annual report a page
        ("Exhibit A-#", 11, 8),
        ("Invoice no. @", 11, 8),  # no page numbers: they begin far from 1
        ("Board paper no. #", 11, 5),
    ],
)
def test_numbered_things_stay_however_many_pages_have_one(line, size, n_pages):
    found = first_and_last(headed(line, size, n_pages=n_pages))
    assert [first for first, _ in found] == [said(line, n) for n in range(1, n_pages + 1)]


@pytest.mark.parametrize(("front", "goes"), [(30, True), (31, False)])
def test_numbers_far_behind_their_pages_are_none_of_pages(front: int, goes: bool):
    """They may begin at 1 behind front matter, which is of thirty pages at most; else they count something else."""
    rng, sheet = Random(5), made.Sheet()
    for n in range(front + 8):
        if n >= front:
            sheet.lines([f"Blad {n - front + 1} van 8"], y=750, size=11)
            sheet.lines([made.prose(rng, 7) for _ in range(9)] + [made.prose(rng, 3)], y=720)
        sheet.page()
    part = parse(io.BytesIO(sheet.save()), ParseJob("made", "pdf", spans=((front + 1, front + 8),)))
    assert ["Blad" in section.text for section in part.sections] == [not goes] * 8


def tables(n_pages: int, names: tuple[str, ...]) -> bytes:
    rng, sheet = Random(5), made.Sheet()
    for _ in range(n_pages):
        rows = [
            names,
            *((rng.choice(made.WORDS), *(str(rng.randrange(100, 999)) for _ in names[1:])) for _ in range(9)),
        ]
        for i, row in enumerate(rows):
            for j, cell in enumerate(row):
                sheet.lines([cell], x=60 + 180 * j, y=760 - 14.3 * i)
        sheet.page()
    return sheet.save()


def test_the_names_of_columns_at_the_distance_of_the_rows_stay():
    found = first_and_last(tables(4, ("Depot", "Stock 2019", "Stock 2020")))
    assert [first for first, _ in found] == ["Depot  Stock 2019  Stock 2020"] * 4


def test_sentences_that_end_alike_stay_whole():
    found = first_and_last(headed("and will be closed by the board", 11, distance=14.3, at_foot=True))
    assert [last for _, last in found] == ["and will be closed by the board"] * 5


def test_what_runs_goes_from_a_page_that_has_little_else():
    rng, sheet = Random(5), made.Sheet()
    for n in range(6):
        sheet.lines(["Report of the board"], y=790, size=9)
        sheet.lines([made.prose(rng, 7) for _ in range(1 if n == 5 else 9)], y=740)
        sheet.page()
    assert "Report" not in str(first_and_last(sheet.save()))


def test_letters_that_are_no_roman_numerals():
    """The dotless i of Turkish, which ignoring case takes for the i of Roman numbers."""
    rng, sheet = Random(5), made.Sheet("Courier", 11)
    for _ in range(3):
        sheet.lines(["~~~", *(made.prose(rng, 4) for _ in range(4))])
        sheet.page()
    found = first_and_last(made.spelled(sheet.save(), {"~": "\u0131"}))
    assert [first for first, _ in found] == ["\u0131\u0131\u0131"] * 3


def chapters(line: str, size: float, y: float, n_pages: int = 24, of: int = 6) -> bytes:
    """Chapters of some pages, each page but their first under a line with the name of the chapter."""
    rng, sheet = Random(5), made.Sheet()
    for n in range(n_pages):
        if n % of:
            sheet.lines([line.format(made.WORDS[n // of])], y=y, size=size)
        sheet.lines([made.prose(rng, 7) for _ in range(12)], y=740)
        sheet.page()
    return sheet.save()


def test_the_running_head_of_each_chapter_goes():
    """It stands on a sixth of the pages only, at the place where most have one; a part of the file reads the same."""
    found = texts(chapters("All about the {}", 9, 790))
    assert found == texts(chapters("", 9, 790))
    part = parse(io.BytesIO(chapters("All about the {}", 9, 790)), ParseJob("made", "pdf", spans=((8, 11),)))
    assert [section.text for section in part.sections] == found[7:11]


def test_a_line_that_three_pages_share_where_others_have_none_stays():
    rng, sheet = Random(5), made.Sheet()
    for n in range(12):
        sheet.lines(["What the board found"] if 4 <= n < 7 else [], y=790)
        sheet.lines([made.prose(rng, 7) for _ in range(12)], y=740)
        sheet.page()
    assert sum("What the board found" in text for text in texts(sheet.save())) == 3
