"""Pieces of text with their places on a page, and the order in which people read them.

Coordinates are points in the direction of the text: x along the line, y down the page, whichever way the page or its
text is turned.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

COLUMN_LINES = 3  # lines that each side of a gutter must have
CELL = 4  # lines that a cell of a table may have beside one of a single line
PROSE = 18  # median characters of a line in a column; the cells of a table are shorter
JUMP = 0.25  # heights that a piece stands higher than the one drawn before it if a column or a cell begins with it
STRAY = 0.03  # share of the pieces before a column that may begin beyond its edge, as the end of a wide formula does
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
    pitch: float = 0.0  # the room that its font gives its first letter along the line

    @property
    def height(self) -> float:
        return self.y1 - self.y0

    @property
    def middle(self) -> float:
        return (self.y0 + self.y1) / 2


Row = list[Piece]
Block = list[Row]  # a column, or a page without columns
Drawn = dict[int, int]  # which place a piece has in the order of the file, by its id
ITEM = re.compile(r"([•·▪◦‣*–—-]|\(?(\d{1,3}(\.\d{1,3})*|[a-zA-Z])[.)])\s")  # begins an entry of a list
CJK = re.compile(
    "[\u2e80-\u312f\u31a0-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00020000-\U0003ffff]"
)  # without spaces
LEADER = re.compile(r" *(?:[.\u00b7\u2026] ?){4,}(?=[\divxlc]+$)")  # dots up to the number of a page
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
    """All rows in the order of reading, for pieces in the order that the file draws them.

    A page is cut across where all above is drawn before all below, or after it; what is left hangs together, and is cut
    into columns where all on one side is. A file that draws columns line by line shows no such cut, but prose runs on.
    """
    return [part for block in _cut(pieces, {id(p): i for i, p in enumerate(pieces)}) for part in _prose(block)]


def _cut(pieces: Sequence[Piece], drawn: Drawn) -> list[Block]:
    blocks: list[Block] = [[]]
    for band in _bands(rows(pieces), drawn):
        parts = _parts(sorted((p for row in band for p in row), key=lambda p: drawn[id(p)])) if len(band) > 1 else []
        if columns := _columns(parts):
            blocks += [block for part in columns for block in _cut(part, drawn)] + [[]]
        elif len(band) <= CELL and len(parts) > 1 and any(len(rows(part)) == 1 for part in parts):
            blocks[-1].append([piece for part in parts for piece in part])  # a cell of several lines beside one of one
        else:
            blocks[-1] += band
    return [block for block in blocks if block]


def _parts(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces in the order they are drawn, parted where that jumps up and one side begins beyond the other."""
    rtl = is_rtl(pieces)
    starts = [-p.x1 if rtl else p.x0 for p in pieces]
    beyond = list(itertools.accumulate(reversed(starts), min))[::-1]
    before: list[float] = []
    parts = [[pieces[0]]]
    for i in range(1, len(pieces)):
        here, there = pieces[i - 1], pieces[i]
        insort(before, starts[i - 1])
        strays = i - bisect_left(before, beyond[i])
        if there.y0 < here.y0 - JUMP * here.height and strays <= STRAY * i:
            parts.append([])
        parts[-1].append(there)
    return parts


def _columns(parts: list[list[Piece]]) -> list[list[Piece]]:
    """The parts if they are columns: of several lines each, which are long in one of them at least."""
    found: list[list[Piece]] = []
    for part in parts:
        if len(rows(part)) >= COLUMN_LINES:
            found.append(part)
        elif found:
            found[-1] += part
        else:
            return []
    return found if len(found) > 1 and any(_is_long(rows(part)) for part in found) else []


def _is_long(block: Block) -> bool:
    """Whether its lines are longer than the names and values of a form, which a file may draw one after the other."""
    return median(len(row_text(row)) for row in block) >= PROSE


def _prose(block: Block) -> list[Block]:
    """A block, or the columns of prose in it that the file draws line by line across the page."""
    parts = _gutter(block, lambda left, right: _runs_on(rows(left)) and _runs_on(rows(right)))
    if parts is None:
        return [block] if block else []
    return [found for part in parts for found in _prose(rows(part))]


def _runs_on(block: Block) -> bool:
    """Whether most lines end for want of room and few begin anew, as in prose; or it is columns of such lines."""
    margins = _margins(block)
    full = [_is_full(row, below, margins) for row, below in itertools.pairwise(block)]
    begun = [row[0].text[:1].isupper() or row[0].text[:1].isdigit() for row in block]
    return (sum(full) > len(full) / 2 and sum(begun) < len(begun) / 2) or len(_prose(block)) > 1


def running_on(block: Block) -> float:
    """The share of rows that end only for want of room, before one that begins within a sentence."""
    margins = _margins(block)
    pairs = [(row, below) for row, below in itertools.pairwise(block) if not below[0].text[:1].isupper()]
    return sum(_is_full(row, below, margins) for row, below in pairs) / len(block)


def _bands(found: Sequence[Row], drawn: Drawn) -> Iterator[Block]:
    """Rows in groups: nothing above a cut is drawn between what is below it."""
    spans = [(min(at), max(at)) for at in ([drawn[id(piece)] for piece in row] for row in found)]
    first = list(itertools.accumulate((a for a, _ in reversed(spans)), min))[::-1]  # of the row and those below
    last = list(itertools.accumulate((b for _, b in reversed(spans)), max))[::-1]
    start, low, high = 0, len(drawn), -1
    for i in range(1, len(found)):
        low, high = min(low, spans[i - 1][0]), max(high, spans[i - 1][1])
        if high < first[i] or low > last[i]:
            yield list(found[start:i])
            start = i
    if found:
        yield list(found[start:])


def row_text(row: Row) -> str:
    """The pieces of a row; a wide gap, as between the cells of a table, shows as two spaces."""
    text = row[0].text
    for before, piece in itertools.pairwise(row):
        gap = max(piece.x0 - before.x1, before.x0 - piece.x1)
        height = max(before.height, piece.height)
        below = gap < 0 and piece.y0 > before.middle  # the next line of a cell
        parts = not below and (gap > height or -gap > min(before.height, piece.height))  # a stamp lies across the row
        text += ("  " if parts else " " if below or piece.is_spaced or gap > 0.15 * height else "") + piece.text
    return LEADER.sub(" ... ", text) if _has_dots(text) else text


def _has_dots(text: str) -> bool:
    return "..." in text or ". ." in text or "\u2026\u2026" in text or "\u00b7\u00b7" in text


def is_fixed(piece: Piece) -> bool:
    """Whether all letters of a piece may be as wide as its first, as in a listing of code."""
    return abs(piece.x1 - piece.x0 - len(piece.text) * piece.pitch) < 0.9 * piece.pitch


def _indents(block: Block) -> list[int]:
    """The spaces before each row: more than none for rows of letters of one width beside others further left."""
    found = [0] * len(block)
    for key, listing in itertools.groupby(
        range(len(block)), lambda i: round(10 * block[i][0].pitch) if is_fixed(block[i][0]) else 0
    ):
        if key and len(at := list(listing)) > 1 and not is_rtl(block[at[0]]):
            left = min(block[i][0].x0 for i in at)
            for i in at:
                found[i] = round((block[i][0].x0 - left) / block[i][0].pitch)
    return found


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
    indents = [n for block in blocks for n in _indents(block)]
    parts: list[list[Line]] = []
    for i, (row, block) in enumerate(ordered):
        step = steps[i - 1] if i else 0.0
        goes_on = step < 0 and parts and not parts[-1][-1].text.rstrip().endswith(ENDS)  # in the next column
        if not parts or (step < 0 and not goes_on) or (usual and step > PARAGRAPH * usual):
            parts.append([])
        below = ordered[i + 1][0] if i + 1 < len(ordered) else None
        parts[-1].append(
            Line(" " * indents[i] + row_text(row), below is not None and _is_full(row, below, margins[id(block)]))
        )
    return parts


def _margins(block: Block) -> tuple[float, float]:
    return min(p.x0 for row in block for p in row), max(p.x1 for row in block for p in row)


def _is_full(row: Row, below: Row, margins: tuple[float, float]) -> bool:
    """Whether the first word below had no room in the row, so that the line is broken for want of space only."""
    if len(row) > 1 or len(below) > 1 or _length(row[0].text) < FULL or ITEM.match(below[0].text):
        return False
    if _has_dots(row[0].text) and LEADER.search(row[0].text):
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


def _gutter(found: Block, are_columns: Callable[[Sequence[Piece], Sequence[Piece]], bool]) -> list[list[Piece]] | None:
    """What is above, on either side of and below the gutter with most lines beside it, as read; None without one."""
    if len(found) < COLUMN_LINES:
        return None
    pieces = sorted((piece for row in found for piece in row), key=lambda p: p.middle)
    middles = [piece.middle for piece in pieces]
    best: tuple[int, list[list[Piece]] | None] = (0, None)
    for x in _candidates(found):
        crossing = [i for i, p in enumerate(pieces) if p.x0 < x < p.x1]
        for a, b in itertools.pairwise([-1, *crossing, len(pieces)]):
            above = bisect_right(middles, middles[a]) if a >= 0 else 0
            below = bisect_left(middles, middles[b]) if b < len(pieces) else b
            if below - above <= best[0]:
                continue
            band = [p for p in pieces[above:below] if not p.x0 < x < p.x1]
            left, right = [p for p in band if p.x1 <= x], [p for p in band if p.x0 >= x]
            if len(band) > best[0] and _side_by_side(left, right) and are_columns(left, right):
                sides = (right, left) if is_rtl(band) else (left, right)
                best = len(band), [pieces[:above], *sides, pieces[below:]]
    return best[1]


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


def _side_by_side(left: Sequence[Piece], right: Sequence[Piece]) -> bool:
    """Whether both sides have lines of some length, at one height."""
    if min(len(left), len(right)) < COLUMN_LINES:
        return False
    if not all(len(side) >= COLUMN_LINES and _is_long(side) for side in map(rows, (left, right))):
        return False
    top = max(min(p.y0 for p in left), min(p.y0 for p in right))
    bottom = min(max(p.y1 for p in left), max(p.y1 for p in right))
    return bottom - top > 2 * min(p.height for p in (*left, *right))
