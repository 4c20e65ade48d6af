"""Pieces of text with their places on a page, and the order in which people read them.

Coordinates are points in the direction of the text: x along the line, y down the page, whichever way the page or its
text is turned.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WIDEST = 6  # heights between the columns of prose, most often; the cells of a table stand farther apart
COLUMN_LINES = 3  # pieces that each side of a gutter must have
PROSE = 18  # median characters of a line in a column; the cells of a table are shorter
SAME_ROW = 0.5  # share of the lower piece's height that two pieces must overlap
SCRIPT = (0.45, 0.8)  # shares of the height of its row that a raised or lowered piece has; a stamp's row has less
PARAGRAPH = 1.45  # times the usual distance of lines
SLACK = 1.0  # heights: the widest line of a ragged column may itself end before the margin
FULL = 24  # characters that a line has at least if it ends for want of room; titles and tables have fewer
ENDS = (".", "!", "?", ":", "”", '"', ")", "。", "؟")  # a paragraph may end with these


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text on one line."""

    text: str
    x0: float
    y0: float  # top
    x1: float
    y1: float  # bottom
    size: float  # of its font, whichever letters it has
    is_spaced: bool = False  # a space stands before it

    @property
    def height(self) -> float:
        return self.y1 - self.y0

    @property
    def middle(self) -> float:
        return (self.y0 + self.y1) / 2


Row = list[Piece]
Block = list[Row]  # a column, or a page without columns
ITEM = re.compile(r"([•·▪◦‣*–—-]|\(?(\d{1,3}(\.\d{1,3})*|[a-zA-Z])[.)])\s")  # begins an entry of a list
CJK = re.compile(
    "[\u2e80-\u312f\u31a0-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00020000-\U0003ffff]"
)  # without spaces
RTL = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]+")  # Hebrew, Arabic and their neighbours


@dataclass(frozen=True, slots=True)
class Line:
    """The text of a row, and whether it ends only because there was no more room."""

    text: str
    goes_on: bool = False


def rows(pieces: Sequence[Piece]) -> list[Row]:
    """Pieces that stand beside each other, rows from top to bottom, each from left to right (or right to left)."""
    found: list[Row] = []
    top = bottom = 0.0
    for piece in sorted(pieces, key=lambda p: p.y0 + p.y1):
        y0, y1 = piece.y0, piece.y1
        if found and min(bottom, y1) - max(top, y0) > SAME_ROW * min(bottom - top, y1 - y0):
            found[-1].append(piece)
            top, bottom = _shared((top, bottom), (y0, y1))
        else:
            found.append([piece])
            top, bottom = y0, y1
    return [sorted(row, key=lambda p: p.x0, reverse=is_rtl(row)) if len(row) > 1 else row for row in found]


def _shared(row: tuple[float, float], piece: tuple[float, float]) -> tuple[float, float]:
    """Where the row runs with that piece in it, from top to bottom."""
    low, high = sorted((row, piece), key=lambda span: span[1] - span[0])
    if SCRIPT[0] * (high[1] - high[0]) < low[1] - low[0] < SCRIPT[1] * (high[1] - high[0]):
        return high  # a raised digit must not keep the lowered one of the same row out
    # what both share: a drop cap or a stamp across the page must not pull in the rows beside it
    return max(row[0], piece[0]), min(row[1], piece[1])


def reading_order(pieces: Sequence[Piece]) -> list[Block]:
    """All rows in reading order: columns one after the other where the page has columns, else from top to bottom."""
    found = rows(pieces)
    gutter = _gutter(pieces, found)
    if gutter is None:
        return [found] if found else []
    above, left, right, below = gutter
    sides = (right, left) if is_rtl(pieces) else (left, right)
    return [block for part in (above, *sides, below) for block in reading_order(part)]


def row_text(row: Row) -> str:
    """The pieces of a row; a wide gap, as between the cells of a table, shows as two spaces."""
    text = row[0].text
    for before, piece in itertools.pairwise(row):
        gap = max(piece.x0 - before.x1, before.x0 - piece.x1)
        height = max(before.height, piece.height)
        parts = gap > height or -gap > min(before.height, piece.height)  # a stamp lies across the row
        text += ("  " if parts else " " if piece.is_spaced or gap > 0.15 * height else "") + piece.text
    return text


def top(row: Row) -> float:
    """Where a row begins by the piece that says most: a stamp across the page reaches far above its row."""
    return max(row, key=lambda p: len(p.text)).y0


def paragraphs(blocks: Sequence[Block]) -> list[list[Line]]:
    """The text of rows in reading order, parted where the distance to the row above is more than usual."""
    ordered = [(row, block) for block in blocks for row in block]
    tops = [top(row) for row, _ in ordered]
    steps = [b - a for a, b in itertools.pairwise(tops)]
    usual = median([step for step in steps if step > 0] or [0.0])
    margins = {id(block): _margins(block) for block in blocks}
    parts: list[list[Line]] = []
    for i, (row, block) in enumerate(ordered):
        step = steps[i - 1] if i else 0.0
        goes_on = step < 0 and parts and not parts[-1][-1].text.rstrip().endswith(ENDS)  # in the next column
        if not parts or (step < 0 and not goes_on) or (usual and step > PARAGRAPH * usual):
            parts.append([])
        below = ordered[i + 1][0] if i + 1 < len(ordered) else None
        parts[-1].append(Line(row_text(row), below is not None and _is_full(row, below, margins[id(block)])))
    return parts


def _margins(block: Block) -> tuple[float, float]:
    return min(p.x0 for row in block for p in row), max(p.x1 for row in block for p in row)


def _is_full(row: Row, below: Row, margins: tuple[float, float]) -> bool:
    """Whether the first word below had no room in the row, so that the line is broken for want of space only."""
    if len(row) > 1 or len(below) > 1 or _length(row[0].text) < FULL or ITEM.match(below[0].text):
        return False
    here, there = row[0], below[0]
    first = 1 if CJK.match(there.text) else len(there.text.split(None, 1)[0])
    word = (there.x1 - there.x0) * first / len(there.text)
    rtl = is_rtl(row)
    room = here.x0 - margins[0] if rtl else margins[1] - here.x1
    indented = here.x1 - there.x1 if rtl else there.x0 - here.x0
    same_size = 0.6 < here.height / max(there.height, 0.1) < 1.7
    return room < word + SLACK * here.height and (indented < here.height or there.y0 < here.y0) and same_size


def _length(text: str) -> int:
    """Letters, those counted twice that are as wide as two of others."""
    return len(text) if text.isascii() else len(text) + len(CJK.findall(text))


def is_rtl(pieces: Sequence[Piece]) -> bool:
    """Whether most letters are written from right to left."""
    text = "".join(p.text for p in pieces)
    right = 0 if text.isascii() else sum(map(len, RTL.findall(text)))
    return bool(right) and 2 * right > sum(c.isalpha() for c in text)


def _gutter(
    pieces: Sequence[Piece], found: Sequence[Row]
) -> tuple[list[Piece], list[Piece], list[Piece], list[Piece]] | None:
    """What is above, left of, right of and below the gutter with most lines beside it; None without columns."""
    best: tuple[int, tuple[list[Piece], ...]] | None = None
    for x in _candidates(found):
        crossing = sorted((p for p in pieces if p.x0 < x < p.x1), key=lambda p: p.middle)
        edges = [float("-inf"), *(p.middle for p in crossing), float("inf")]
        for top, bottom in itertools.pairwise(edges):
            band = [p for p in pieces if top < p.middle < bottom and not p.x0 < x < p.x1]
            left, right = [p for p in band if p.x1 <= x], [p for p in band if p.x0 >= x]
            if min(len(left), len(right)) < COLUMN_LINES or (best and len(band) <= best[0]):
                continue
            if not (all(map(_is_prose, (left, right))) and _side_by_side(left, right)):
                continue
            if _is_narrow(x, band) or all(map(_is_filled, (left, right))):
                above = [p for p in pieces if p.middle <= top]
                below = [p for p in pieces if p.middle >= bottom]
                best = len(band), (above, left, right, below)
    if best is None:
        return None
    above, left, right, below = best[1]
    return above, left, right, below


def _candidates(found: Sequence[Row]) -> list[int]:
    """Where a gutter may run: the middles of gaps between neighbours in a row, the frequent ones first."""
    counts: dict[int, int] = {}
    for row in found:
        across = sorted(row, key=lambda p: p.x0)
        for a, b in itertools.pairwise(across):
            if b.x0 - a.x1 > 0.5 * min(a.height, b.height):
                for x in {round(b.x0 - 2), round((a.x1 + b.x0) / 2)}:
                    counts[x] = counts.get(x, 0) + 1
    return sorted(counts, key=lambda x: -counts[x])[:12]


def _is_prose(side: Sequence[Piece]) -> bool:
    """Columns of prose have long lines that begin at one place."""
    lengths = [len(row_text(row)) for row in rows(side)]
    return len(lengths) >= COLUMN_LINES and median(lengths) >= PROSE


def _side_by_side(left: Sequence[Piece], right: Sequence[Piece]) -> bool:
    top = max(min(p.y0 for p in left), min(p.y0 for p in right))
    bottom = min(max(p.y1 for p in left), max(p.y1 for p in right))
    return bottom - top > 2 * min(p.height for p in (*left, *right))


def _is_narrow(x: float, band: Sequence[Piece]) -> bool:
    """Whether little room is at the gutter: prose fills its columns, the cells of a table do not."""
    gaps = []
    for row in rows(band):
        left, right = [p.x1 for p in row if p.x1 <= x], [p.x0 for p in row if p.x0 >= x]
        if left and right:
            gaps.append(min(right) - max(left))
    return not gaps or median(gaps) < WIDEST * median(p.height for p in band)


def _is_filled(side: Sequence[Piece]) -> bool:
    """Whether most lines end for want of room and few begin anew: prose runs on, however wide the gutter is."""
    block = rows(side)
    margins = _margins(block)
    full = [_is_full(row, below, margins) for row, below in itertools.pairwise(block)]
    begun = [row[0].text[:1].isupper() or row[0].text[:1].isdigit() for row in block]
    return sum(full) > len(full) / 2 and sum(begun) < len(begun) / 2
