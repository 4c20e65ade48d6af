"""Rows, columns and words of a page of a PDF where they are hard to tell: tall pieces, cells, dashes, vertical text."""

from __future__ import annotations

import io
import re
from random import Random
from textwrap import wrap

import pytest
from reportlab.pdfbase import pdfmetrics

from kvcli.documents import Limits, document_of
from kvcli.documents.dehyphenate import Words, mended
from kvcli.documents.document import ParseJob
from kvcli.documents.reading_order import Line, LinePiece, reading_order, row_text, rows
from kvcli.documents.worker import parse
from tests.documents import made


def text_of(sheet: made.Sheet) -> str:
    """What its first page says, read without a process around."""
    return parse(io.BytesIO(sheet.save()), ParseJob("made", "pdf")).sections[0].text


def joined(*lines: str) -> str:
    return mended([[Line(line) for line in lines]], Words())


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (("Gimness  12  -", "Bethden  7  4"), "Gimness  12  -\nBethden  7  4"),
        (("12 -", "14 in debt"), "12 -\n14 in debt"),
        (("x = a -", "b where"), "x = a -\nb where"),
        (("see over \u2010", "there"), "see over \u2010\nthere"),
        (("infor-", "mation, here"), "information,\nhere"),
        (("the pre-", "and post-war years"), "the pre- and\npost-war years"),
        (("Ein-", "und Ausfuhr"), "Ein- und\nAusfuhr"),
        (("two- to three-", "or four-fold"), "two- to three- or\nfour-fold"),
        (("short\u00ad", "and long-term"), "short- and\nlong-term"),
        (
            ("see https://example.org/northern-", "channel/survey, 2020"),
            "see https://example.org/northern-channel/survey,\n2020",
        ),
        (("in /usr/share/long-", "names/a-b"), "in /usr/share/long-names/a-b"),
    ],
)
def test_what_a_hyphen_at_the_end_of_a_line_is(lines, text):
    assert joined(*lines) == text


def test_a_word_that_the_text_has_whole_is_no_suspended_one():
    words = Words()
    words.add(["a thousand of them"])
    assert mended([[Line("a thous-"), Line("and more")]], words) == "a thousand\nmore"


def test_a_word_without_end_takes_no_squares():
    sheet = made.Sheet()
    sheet.lines(["a" * 100_000 + "_-", "b infor-", "mation"])
    text = document_of(sheet.save(), "long.pdf", limits=Limits(cpu=8)).sections[0].text
    assert text.endswith("b information")


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (("河流委员会的年度报告", "北方的桥梁"), "河流委员会的年度报告北方的桥梁"),
        (("委员会、", "「二」"), "委员会、「二」"),
        (("委员会 2019", "年度"), "委员会 2019 年度"),
        (("위원회의", "보고서"), "위원회의 보고서"),  # Korean has spaces
    ],
)
def test_no_space_comes_between_chinese_letters(lines, text):
    assert mended([[Line(line, goes_on=True) for line in lines]], Words()) == text


def test_fields_of_a_form_are_lines_of_their_own():
    sheet = made.Sheet()
    sheet.lines(["Form"])
    fields = sheet.canvas.acroForm
    for i, (name, value) in enumerate([("Note", "see over -"), ("City", "Thedale-"), ("Depot", "Gimness")]):
        fields.textfield(name=name, tooltip=name, value=value, x=150, y=700 - 40 * i, width=200, height=16)
    assert text_of(sheet) == "Form\n\nNote: see over -\nCity: Thedale-\nDepot: Gimness"


def _across(sheet: made.Sheet, text: str, x: float, y: float, angle: float, size: float) -> None:
    """Draw a stamp over the page."""
    sheet.canvas.saveState()
    sheet.canvas.translate(x, y)
    sheet.canvas.rotate(angle)
    sheet.lines([text], x=0, y=0, size=size)
    sheet.canvas.restoreState()


@pytest.mark.parametrize(
    "stamp",
    [
        ("DRAFT", 150, 250, 45, 100),
        ("PAID IN FULL", 150, 640, 20, 24),
        ("T", 40, 716, 0, 48),  # a drop cap
    ],
)
def test_what_is_tall_does_not_pull_in_the_rows_beside_it(stamp):
    rng, sheet = Random(3), made.Sheet()  # each line begins a little to the left of the one above
    _across(sheet, *stamp)
    lines = [f"line {i} {made.prose(rng, 8)}" for i in range(40)]
    for i, line in enumerate(lines):
        sheet.lines([line], x=94 - 0.1 * i, y=780 - 15 * i)
    text = " ".join(text_of(sheet).split())
    assert [line for line in lines if line not in text] == []
    assert [text.index(line) for line in lines] == sorted(text.index(line) for line in lines)


def test_a_stamp_is_parted_from_the_text_it_lies_on():
    row = [LinePiece("a line of the text", 0, 0, 100, 10, 10), LinePiece("DRAFT", 30, -30, 70, 40, 70)]
    assert row_text(row) == "a line of the text  DRAFT"


def test_a_space_before_a_piece_stays():
    sheet = made.Sheet()
    text = sheet.canvas.beginText(60, 760)
    for part, size, rise in (("Revenue was 12.5 million", 11, 0), ("3", 7, 4), (" in the year of the survey.", 11, 0)):
        text.setFont("Helvetica", size)
        text.setRise(rise)
        text.textOut(part)
    sheet.canvas.drawText(text)
    assert text_of(sheet) == "Revenue was 12.5 million[3] in the year of the survey."


def test_a_raised_and_a_lowered_digit_stay_in_one_row():
    spans = (("area of 5 m", 0, 10), ("2", -3, 4), ("of CO", 0, 10), ("2", 6, 13), ("was emitted", 0, 10))
    pieces = [LinePiece(text, 60 * i, y0, 60 * i + 58, y1, y1 - y0) for i, (text, y0, y1) in enumerate(spans)]
    assert [row_text(row) for row in rows(pieces)] == ["area of 5 m 2 of CO 2 was emitted"]


LEFT = (
    "Replacement of the northern gauge",
    "Repair of the southern bridge",
    "Survey of the channel",
    "A new lantern for all",
)
RIGHT = (
    "Completed in the spring of 2020",
    "Begun in the winter, not paid",
    "Put off until next year",
    "Paid in full by the board",
)


def test_cells_of_long_text_stay_in_their_rows():
    sheet = made.Sheet()
    for i, cells in enumerate(zip(LEFT, RIGHT, strict=True)):
        for x, cell in zip((60, 330), cells, strict=True):
            sheet.lines([cell], x=x, y=760 - 16 * i)
    assert text_of(sheet) == "\n".join(f"{a}  {b}" for a, b in zip(LEFT, RIGHT, strict=True))


def test_the_same_text_in_columns_is_read_down():
    """As prose fills them: the columns stand near each other."""
    pieces = [LinePiece(text, 0, 16 * i, 160, 16 * i + 10, 10) for i, text in enumerate(LEFT)]
    pieces += [LinePiece(text, 180, 16 * i, 340, 16 * i + 10, 10) for i, text in enumerate(RIGHT)]
    assert [row[0].text for block in reading_order(pieces) for row in block] == [*LEFT, *RIGHT]


@pytest.mark.parametrize(("gutter", "early"), [(65, (0,)), (50, (0, 25, 50)), (90, (0, 25, 50))])
def test_columns_of_prose_are_read_down_however_wide_the_gutter_is(gutter, early):
    rng, pieces = Random(5), []
    for x, ends in ((0, early), (180 + gutter, (0,))):
        for i, line in enumerate(wrap(" ".join(made.prose(rng, 12) for _ in range(9)), 34)[:12]):
            pieces.append(LinePiece(line, x, 12 * i, x + 180 - ends[i % len(ends)], 12 * i + 10, 10))
    assert [len(block) for block in reading_order(pieces)] == [12, 12]


def test_cells_of_much_the_same_length_stay_in_their_rows():
    pieces = [
        LinePiece(f"{text} {i:02d}", x, 12 * i, x + 180, 12 * i + 10, 10)
        for i in range(12)
        for x, text in ((0, "Replaced the gauge of the depot"), (245, "Paid in full by the river board"))
    ]
    assert [len(row) for block in reading_order(pieces) for row in block] == [2] * 12


def test_vertical_lines_are_read_from_right_to_left():
    columns = ("abcdefghij", "klmnopqrst", "uvwxyzABC", "DEFGHIJKLM")
    letters = dict(
        zip(
            "".join(columns),
            "河川委員会年度報告書北方橋梁冬期修復工事費用合計三百万元也次回会議木月十日予定",
            strict=True,
        )
    )
    sheet = made.Sheet("Courier", 19)
    for i, column in enumerate(columns):
        for j, letter in enumerate(column):
            sheet.lines([letter], x=500 - 30 * i, y=780 - 19 * j)
    data = made.spelled(sheet.save(), letters)
    text = parse(io.BytesIO(data), ParseJob("made", "pdf")).sections[0].text
    assert text == "\n".join("".join(letters[c] for c in column) for column in columns)


def drawn(*rows: tuple[float, float, str], height: float = 10) -> list[LinePiece]:
    """Pieces in the order they are drawn: left edge, top, text; five points a letter."""
    return [LinePiece(text, x, y, x + 5 * len(text), y + height, height) for x, y, text in rows]


def read(pieces: list[LinePiece]) -> list[str]:
    return [row_text(row) for block in reading_order(pieces) for row in block]


def test_a_card_of_three_columns_is_read_column_after_column():
    """Each column a table of its own: commands, and what they do."""
    columns = [[(f"C-{a}{i}", f"what {a}{i} does to the file") for i in range(6)] for a in "xyz"]
    places = [
        (260 * c + 50 * side, 12.0 * i, words[side])
        for c, column in enumerate(columns)
        for i, words in enumerate(column)
        for side in (0, 1)
    ]
    assert read(drawn(*places)) == [f"{key}  {what}" for column in columns for key, what in column]


def test_a_table_in_one_column_does_not_reach_into_the_other():
    rng = Random(5)
    table = [(f"{i}.760", f"2.{i}10", "3.120", f"1.{i}20") for i in range(8)]
    left = [(70.0 * j, 12.0 * i, cell) for i, row in enumerate(table) for j, cell in enumerate(row)]
    prose = wrap(made.prose(rng, 90), 40)[:8]
    right = [(262.0, 12.0 * i, line) for i, line in enumerate(prose)]
    assert read(drawn(*left, *right)) == ["  ".join(row) for row in table] + prose


def test_a_wide_table_keeps_its_rows():
    rows = [
        (*(str(100 * i + j) for j in range(9)), f"the command number {i} of the list, with its words") for i in range(9)
    ]
    places = [(22.0 * j, 12.0 * i, cell) for i, row in enumerate(rows) for j, cell in enumerate(row)]
    assert [row.split() for row in read(drawn(*places))] == [" ".join(row).split() for row in rows]


def test_a_cell_of_several_lines_stays_one_beside_those_of_one_line():
    """As tables centre their cells: what stands at one height is not one row."""
    names = ("gauge", "bridge", "lantern")
    cell = ("of the board, which", "had it built beside", "the harbour in winter")
    places = []
    for i, name in enumerate(names):
        places += [(0, 50 * i + 11, name), *((80, 50 * i + 12 * j, line) for j, line in enumerate(cell[: 2 + i % 2]))]
        places.append((220, 50 * i + 5, f"{i}4803"))
    expected = [f"{name}  {' '.join(cell[: 2 + i % 2])}  {i}4803" for i, name in enumerate(names)]
    assert read(drawn(*places)) == expected


def test_the_values_of_a_form_stay_beside_their_names():
    """Which such a file draws after all of the names."""
    names, values = ("Name", "Depot", "Date", "Sum"), ("Wemus Brethak", "Gimness", "12 May", "59")
    places = [(0.0, 15.0 * i, name) for i, name in enumerate(names)]
    places += [(120.0, 15.0 * i, value) for i, value in enumerate(values)]
    assert read(drawn(*places)) == [f"{name}  {value}" for name, value in zip(names, values, strict=True)]


def test_a_formula_that_ends_in_the_other_column_does_not_join_them():
    rng = Random(5)
    left, right = (wrap(made.prose(rng, 400), 40)[:48] for _ in range(2))
    places = [(0.0, 12.0 * i, line) for i, line in enumerate(left)] + [(214.0, 290.0, "(3)")]
    places += [(212.0, 12.0 * i, line) for i, line in enumerate(right)]
    assert [text for text in read(drawn(*places)) if "(3)" not in text][-40:] == right[-40:]


@pytest.mark.parametrize("across", [False, True])
def test_columns_of_hebrew_are_read_from_the_right_one(across):
    rng = Random(5)
    text = made.prose(rng, 200).translate({ord(a): b for a, b in made.HEBREW.items()}).casefold()
    sides = [[line for line in wrap(text, 40) if len(line) > 37][:9], wrap(text[7:], 40)[:9]]
    places = [(side, i, line) for side, lines in zip((1, 0), sides, strict=True) for i, line in enumerate(lines)]
    if across:
        places.sort(key=lambda place: place[1])
    else:  # lines that end anywhere: no prose that its filled lines would tell from a table
        places = [(side, i, line[: 20 + 5 * (i % 4)].strip()) for side, i, line in places]
    pieces = [LinePiece(t, 220 * s + 200 - 5 * len(t), 12 * i, 220 * s + 200, 12 * i + 10, 10) for s, i, t in places]
    assert read(pieces) == [line for _, _, line in sorted(places, key=lambda place: (-place[0], place[1]))]


def test_a_sideways_table_is_read_row_by_row_and_what_stands_upright_by_itself():
    sheet = made.Sheet()
    sheet.lines(["16 The annual report"], y=800)
    sheet.canvas.saveState()
    sheet.canvas.rotate(90)
    rows = [("Depot", "Stock", "Crates of copper"), *((made.WORDS[i], f"{i}17", f"{i} and more") for i in range(12))]
    for i, row in enumerate(rows):
        for j, cell in enumerate(row):
            sheet.lines([cell], x=100 + 150 * j, y=-120 - 20 * i)
    sheet.canvas.restoreState()
    sheet.lines(["printed for the board"], y=30)
    lines = ["16 The annual report", *("  ".join(row) for row in rows), "printed for the board"]
    assert [line for line in text_of(sheet).split("\n") if line] == lines


@pytest.mark.parametrize(
    ("before", "accent", "letter", "behind", "whole"),
    [
        ("Aur", "\u00b4", "e", "lien Gimness", "Aurélien Gimness"),
        ("J", "¨", "o", "rg", "Jörg"),
        ("gar", "\u00b8", "c", "on", "garçon"),
        ("up to 3 ", "¯", "A", "", "up to 3 Ā"),
        ("na", "¨", "\u0131", "ve", "naïve"),
    ],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_an_accent_drawn_by_itself_joins_the_letter_it_stands_over(before, accent, letter, behind, whole, is_last):
    sheet = made.Sheet()
    sign = letter.replace("\u0131", "i")
    x = 60 + pdfmetrics.stringWidth(before, "Helvetica", 11)
    middle = (pdfmetrics.stringWidth(sign, "Helvetica", 11) - pdfmetrics.stringWidth(accent, "Helvetica", 11)) / 2
    parts = [(x + middle, accent), (x, sign + behind)]
    for at, text in [(60, before), *(parts[::-1] if is_last else parts)]:
        sheet.canvas.setFont("Helvetica", 11)
        sheet.canvas.drawString(at, 700, text)
    data = made.spelled(sheet.save(), {"i": "\u0131"}) if sign != letter else sheet.save()
    assert parse(io.BytesIO(data), ParseJob("made", "pdf")).sections[0].text == whole


def test_an_accent_beside_a_letter_stays_by_itself():
    sheet = made.Sheet()
    lines = ["type `name` or 20 \u00b4 of arc", "and the next line"]
    sheet.lines(lines)
    assert text_of(sheet).split() == " ".join(lines).split()


def raised(*lines: str) -> str:
    """What is read of lines in which `{6}` is raised and `<2>` is lowered, in smaller letters."""
    sheet = made.Sheet()
    for i, line in enumerate(lines):
        text = sheet.canvas.beginText(60, 760 - 40 * i)
        for part in re.findall(r"\{[^}]*\}|<[^>]*>|[^{<]+", line):
            rise = 4 if part[0] == "{" else -2 if part[0] == "<" else 0
            text.setFont("Helvetica", 7 if rise else 11)
            text.setRise(rise)
            text.textOut(part.strip("{}<>") if rise else part)
        sheet.canvas.drawText(text)
    return text_of(sheet).replace("\n\n", "\n")


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (("a field of 10{6} metres",), "a field of 10^6 metres"),
        (("10{-6} mol and 5 m{2} of it",), "10^-6 mol and 5 m^2 of it"),
        (("the 1{st} of 2{n} boards, H<2>O",), "the 1st of 2^n boards, H2O"),
        (("in base 1010<2> it is so",), "in base 1010_2 it is so"),
        (("so log<2>8 is 3",), "so log2 8 is 3"),
        (("since the treaty.{12}",), "since the treaty.[12]"),
        (
            ("of 1848{3}, on 50 m{3}", "{3} See the survey."),
            "of 1848[3], on 50 m^3\n[3] See the survey.",
        ),
        (("as surveyed{1,2} before",), "as surveyed[1,2] before"),
    ],
)
def test_what_is_raised_or_lowered_changes_no_number(lines, text):
    assert raised(*lines) == text


def test_a_digit_drawn_by_itself_behind_a_year_is_raised_too():
    sheet = made.Sheet()
    width = pdfmetrics.stringWidth("Since 1848", "Helvetica", 11)
    sheet.lines(["Since 1848"], x=60, y=700)
    sheet.lines(["and after that the board has met."], x=60 + width + 8, y=700)
    sheet.lines(["3"], x=60 + width + 0.5, y=704, size=7)
    assert "18483" not in text_of(sheet)


def manuscript(step: int, x: float, first: int = 1, size: float = 7, font: str = "Helvetica") -> str:
    rng, sheet = Random(3), made.Sheet(font, 10)
    for i, line in enumerate(wrap(made.prose(rng, 150), 60), first):
        sheet.lines([line], x=90, y=780 - 20 * i + 20 * first)
        sheet.lines([str(i)] if i % step == 0 else [], x=x, y=780 - 20 * i + 20 * first, size=size)
    return " ".join(text_of(sheet).split())


@pytest.mark.parametrize(
    ("step", "x", "first", "size", "font"),
    [
        (1, 55, 1, 7, "Helvetica"),
        (1, 66, 131, 10, "Helvetica"),  # near the text
        (5, 55, 1, 7, "Times-Roman"),
        (5, 520, 1, 10, "Helvetica"),
        (1, 60, 1, 10, "Courier"),
    ],
)
def test_numbers_of_lines_are_no_words(step, x, first, size, font):
    assert manuscript(step, x, first, size, font) == made.prose(Random(3), 150)


def test_numbers_of_entries_stay():
    entries = (
        "Wages and salaries paid to the keepers",
        "Interest on all deposits of the board",
        "Rents",
        "Sum of all that",
    )
    sheet = made.Sheet()
    for i, entry in enumerate(entries):
        sheet.lines([str(i + 1)], x=50, y=760 - 16 * i)
        sheet.lines([entry], x=80, y=760 - 16 * i)
    assert text_of(sheet) == "\n".join(f"{i}  {entry}" for i, entry in enumerate(entries, 1))


@pytest.mark.parametrize("dots", [".", ". ", " . "])
def test_entries_of_a_contents_keep_their_lines_and_three_dots(dots):
    sheet = made.Sheet()
    entries = (("1 Introduction", "3"), ("2 Survey of the northern channel", "12"), ("A Appendix", "xii"))
    for i, (title, page) in enumerate(entries):
        sheet.lines([f"{title}{dots * 40}{page}"], y=760 - 16 * i, size=8)
    assert text_of(sheet) == "\n".join(f"{title} ... {page}" for title, page in entries)


@pytest.mark.parametrize("x", [None, 60])
def test_a_listing_keeps_its_indentation(x):
    code = [
        "def depth(gauge):",
        "    for row in gauge:",
        "        if row > 3:",
        "            return row",
        "    return 0",
    ]
    sheet = made.Sheet("Courier", 10)
    for i, line in enumerate(code):
        indent = len(line) - len(line.lstrip())
        sheet.lines([line if x is None else line.lstrip()], x=60 + (0 if x is None else 6 * indent), y=700 - 12 * i)
    sheet.lines(["A line in another font, which is no code."], y=600, font="Helvetica")
    assert text_of(sheet).split("\n")[:5] == code
