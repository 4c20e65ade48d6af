"""Text pieces with their boxes on a page, and the order in which people read them.

Coordinates are points in the direction of the text: x along the line, y down the page, for any rotation of the page or
its text.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

COLUMN_LINES = 3  # fewest lines on each side of a gutter
CELL = 4  # most lines of a table cell beside a cell of one line
PROSE = 18  # median characters of a line in a column; table cells are shorter
JUMP = 0.25  # smallest upward jump, in heights, from the piece drawn before, at the start of a column or cell
STRAY = 0.03  # largest share of pieces before a column that begin beyond its edge, such as the end of a wide formula
SAME_ROW = 0.5  # smallest overlap of two pieces in a row, as a share of the lower piece's height
SCRIPT = (0.45, 0.8)  # height range of raised or lowered text, as shares of its row's height; below: a row with a stamp
PARAGRAPH = 1.45  # times the usual line distance
SLACK = 1.0  # heights: the widest line of a ragged column may also end before the margin
FULL = 24  # fewest characters of a full line; titles and table cells have fewer
ENDS = (".", "!", "?", ":", "”", '"', ")", "。", "؟")  # a paragraph may end with these


@dataclass(frozen=True, slots=True)
class LinePiece:
    """A run of text on one line."""

    text: str
    x0: float
    y0: float  # top
    x1: float
    y1: float  # bottom
    size: float  # font size, independent of its characters
    is_spaced: bool = False  # a space precedes the piece
    pitch: float = 0.0  # advance width of its first character along the line
    angle: int = 0  # quarter turns
    base: float = 0.0  # y of the baseline
    is_same: bool = False  # drawn in one run with the piece before

    @property
    def height(self) -> float:
        return self.y1 - self.y0

    @property
    def middle(self) -> float:
        return (self.y0 + self.y1) / 2


Row = list[LinePiece]
Block = list[Row]  # a column, or a page without columns
ITEM = re.compile(r"([•·▪◦‣*–—-]|\(?(\d{1,3}(\.\d{1,3})*|[a-zA-Z])[.)])\s")  # begins a list entry
# Chinese and Japanese characters, which have no spaces between words
CJK = re.compile("[\u2e80-\u312f\u31a0-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00020000-\U0003ffff]")
DOT = r"[.\u00b7\u2026] ?"
LEADER = re.compile(rf"{DOT}(?:{DOT}){{3,}}(?=[\divxlc]+$)")  # up to a page number
RTL = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]+")  # Hebrew, Arabic and neighbouring scripts


@dataclass(frozen=True, slots=True)
class Line:
    """The text of a row, and whether it is full, so that its paragraph continues on the next line."""

    text: str
    goes_on: bool = False


def rows(pieces: Sequence[LinePiece]) -> list[Row]:
    """Group pieces into rows from top to bottom, each from left to right (or right to left)."""
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
    """Return the vertical extent of a row after a piece is added."""
    low, high = sorted((row, piece), key=lambda span: span[1] - span[0])
    if SCRIPT[0] * (high[1] - high[0]) < low[1] - low[0] < SCRIPT[1] * (high[1] - high[0]):
        return high  # a raised digit must not exclude the lowered one of the same row
    # the common part: a drop cap or a stamp across the page must not pull in the rows beside it
    return max(row[0], piece[0]), min(row[1], piece[1])


def reading_order(pieces: Sequence[LinePiece]) -> list[Block]:
    """Return all rows in reading order, for pieces in drawing order.

    A page is cut across where all rows above are drawn before or after all rows below. Each band is cut into columns if
    one side is drawn first. Columns that a file draws line by line have no such cut and are found by their prose.
    """
    return [part for block in _cut(pieces) for part in _prose(block)]


def _cut(pieces: Sequence[LinePiece]) -> list[Block]:
    drawn = {id(piece): i for i, piece in enumerate(pieces)}
    blocks: list[Block] = [[]]
    for band in _bands(rows(pieces), drawn):
        parts = _parts(sorted((p for row in band for p in row), key=lambda p: drawn[id(p)])) if len(band) > 1 else []
        if columns := _columns(parts):
            blocks += [block for part in columns for block in _cut(part)] + [[]]
        elif len(band) <= CELL and len(parts) > 1 and any(len(rows(part)) == 1 for part in parts):
            blocks[-1].append([piece for part in parts for piece in part])  # a taller cell beside a cell of one line
        else:
            blocks[-1] += band
    return [block for block in blocks if block]


def _parts(pieces: Sequence[LinePiece]) -> list[list[LinePiece]]:
    """Split pieces in drawing order at jumps up the page, if all later pieces begin beyond the earlier ones."""
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


def _columns(parts: list[list[LinePiece]]) -> list[list[LinePiece]]:
    """Return the parts if they are columns: several lines each, with long lines in at least one part."""
    found: list[list[LinePiece]] = []
    for part in parts:
        if len(rows(part)) >= COLUMN_LINES:
            found.append(part)
        elif found:
            found[-1] += part
        else:
            return []
    return found if len(found) > 1 and any(_is_long(rows(part)) for part in found) else []


def _is_long(block: Block) -> bool:
    """True if the lines are longer than names and values of a form, which a file may draw one after the other."""
    return median(len(row_text(row)) for row in block) >= PROSE


def _prose(block: Block) -> list[Block]:
    """Return a block, or the prose columns in it that the file draws line by line across the page."""
    parts = _gutter(block)
    return [found for part in parts for found in _prose(part)] if parts else [block] if block else []


def _runs_on(block: Block) -> bool:
    """True if most lines are full and few start a sentence, as in prose, or if the block has columns of such lines."""
    full = _full(block)
    begun = [row[0].text[:1].isupper() or row[0].text[:1].isdigit() for row in block]
    return (sum(full) > len(full) / 2 and sum(begun) < len(begun) / 2) or len(_prose(block)) > 1


def running_on(block: Block) -> float:
    """Return the share of full rows that are followed by a row within a sentence."""
    goes_on = [
        is_full and not below[0].text[:1].isupper() for is_full, below in zip(_full(block), block[1:], strict=True)
    ]
    return sum(goes_on) / len(block)


def _bands(found: Block, drawn: dict[int, int]) -> Iterator[Block]:
    """Yield bands of rows: all above a cut is drawn before all below, or after it. `drawn`: drawing order by id."""
    start, n, first, last = 0, 0, len(drawn), -1
    for i, row in enumerate(found, 1):
        places = [drawn[id(piece)] for piece in row]
        n, first, last = n + len(row), min(first, *places), max(last, *places)
        if last < n or first >= len(drawn) - n:
            yield found[start:i]
            start = i


def row_text(row: Row) -> str:
    """Return the text of a row; a wide gap, as between table cells, becomes two spaces."""
    text = row[0].text
    for before, piece in itertools.pairwise(row):
        gap = max(piece.x0 - before.x1, before.x0 - piece.x1)
        height = max(before.height, piece.height)
        below = gap < 0 and piece.y0 > before.middle  # the next line of a cell
        parts = not below and (gap > height or -gap > min(before.height, piece.height))  # a stamp crosses the row
        text += ("  " if parts else " " if below or piece.is_spaced or gap > 0.15 * height else "") + piece.text
    return " ... ".join(part.rstrip(" ") for part in LEADER.split(text))


def is_fixed(piece: LinePiece) -> bool:
    """True if all characters of a piece may be as wide as its first, as in a code listing."""
    return abs(piece.x1 - piece.x0 - len(piece.text) * piece.pitch) < 0.9 * piece.pitch


def _indents(block: Block) -> list[int]:
    """Return the indent of each row in spaces; above 0 only for monospaced rows next to rows further left."""
    found: list[int] = []
    for pitch, alike in itertools.groupby(block, lambda row: round(10 * row[0].pitch) if is_fixed(row[0]) else 0):
        listing = list(alike)
        left, is_code = min(row[0].x0 for row in listing), pitch and not is_rtl(listing[0])
        found += [round((row[0].x0 - left) / row[0].pitch) if is_code else 0 for row in listing]
    return found


def top(row: Row) -> float:
    """Return the top of a row by its longest piece, because a stamp across the page extends far above its row."""
    return max(row, key=lambda p: len(p.text)).y0


def paragraphs(blocks: Sequence[Block]) -> list[list[Line]]:
    """Return the text of rows in reading order, split into paragraphs where the row distance is above usual."""
    ordered = [row for block in blocks for row in block]
    steps = [top(below) - top(row) for row, below in itertools.pairwise(ordered)]
    usual = median([step for step in steps if step > 0] or [0.0])
    full = [is_full for block, after in zip(blocks, [*blocks[1:], []], strict=True) for is_full in _full(block, after)]
    indents = [n for block in blocks for n in _indents(block)]
    parts: list[list[Line]] = []
    for row, step, indent, is_full in zip(ordered, [0.0, *steps], indents, [*full, False], strict=True):
        goes_on = step < 0 and parts and not parts[-1][-1].text.rstrip().endswith(ENDS)  # in the next column
        if not parts or (step < 0 and not goes_on) or (usual and step > PARAGRAPH * usual):
            parts.append([])
        parts[-1].append(Line(" " * indent + row_text(row), is_full))
    return parts


def _full(block: Block, after: Sequence[Row] = ()) -> list[bool]:
    """Return, for each row with a row below it (in the block, or the first of `after`), whether it is full."""
    left, right = min(p.x0 for row in block for p in row), max(p.x1 for row in block for p in row)
    return [_is_full(row, below, left, right) for row, below in itertools.pairwise([*block, *after[:1]])]


def _is_full(row: Row, below: Row, left: float, right: float) -> bool:
    """True if the first word below does not fit into the row, so that the line was only wrapped."""
    here, there = row[0], below[0]
    if len(row) > 1 or len(below) > 1 or ITEM.match(there.text) or LEADER.search(here.text):
        return False
    if len(here.text) + len(CJK.findall(here.text)) < FULL:  # wide characters count twice
        return False
    first = 1 if CJK.match(there.text) else len(there.text.split(None, 1)[0])
    word = (there.x1 - there.x0) * first / len(there.text)
    rtl = is_rtl(row)
    room = here.x0 - left if rtl else right - here.x1
    indented = here.x1 - there.x1 if rtl else there.x0 - here.x0
    same_size = 0.6 < here.height / max(there.height, 0.1) < 1.7
    return room < word + SLACK * here.height and (indented < here.height or there.y0 < here.y0) and same_size


def is_rtl(pieces: Sequence[LinePiece]) -> bool:
    """True if most letters are written from right to left."""
    text = "".join(p.text for p in pieces)
    right = 0 if text.isascii() else sum(map(len, RTL.findall(text)))
    return bool(right) and 2 * right > sum(c.isalpha() for c in text)


def _gutter(block: Block) -> list[Block]:
    """Return lines above, beside and below the best gutter, in reading order; [] without a gutter."""
    pieces = sorted((piece for row in block for piece in row), key=lambda p: p.middle)
    middles = [piece.middle for piece in pieces]
    most, found = 0, list[Block]()
    for x in _candidates(block):
        crossing = [piece.middle for piece in pieces if piece.x0 < x < piece.x1]
        for high, low in itertools.pairwise([-math.inf, *crossing, math.inf]):
            above, below = bisect_right(middles, high), bisect_left(middles, low)
            if below - above <= most:
                continue
            band = pieces[above:below]
            sides = [p for p in band if p.x1 <= x], [p for p in band if p.x0 >= x]
            if _side_by_side(*sides) and all(_runs_on(rows(side)) for side in sides):
                parts = [pieces[:above], *(sides[::-1] if is_rtl(band) else sides), pieces[below:]]
                most, found = len(band), [rows(part) for part in parts]
    return found


def _candidates(block: Block) -> list[int]:
    """Return x positions for a gutter: middles of gaps between neighbours in a row, the frequent ones first."""
    pairs = [pair for row in block for pair in itertools.pairwise(sorted(row, key=lambda p: p.x0))]
    gaps = [(a.x1, b.x0) for a, b in pairs if b.x0 - a.x1 > 0.5 * min(a.height, b.height)]
    counts = Counter(x for a, b in gaps for x in {round(b - 2), round((a + b) / 2)})
    return sorted(counts, key=lambda x: -counts[x])[:12]


def _side_by_side(left: Sequence[LinePiece], right: Sequence[LinePiece]) -> bool:
    """True if both sides have long lines at the same height."""
    if min(len(left), len(right)) < COLUMN_LINES:
        return False
    if not all(len(side) >= COLUMN_LINES and _is_long(side) for side in map(rows, (left, right))):
        return False
    top = max(min(p.y0 for p in side) for side in (left, right))
    bottom = min(max(p.y1 for p in side) for side in (left, right))
    return bottom - top > 2 * min(p.height for p in (*left, *right))
