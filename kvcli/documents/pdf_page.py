"""One page of a PDF: its text pieces with their boxes, rotated into reading direction."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from kvcli.documents.accents import GONE, with_accents
from kvcli.documents.dehyphenate import clean
from kvcli.documents.pdf_calls import Box, Typed, field_lines, handle, ink, plain, told
from kvcli.documents.pdf_seen import VisiblePages
from kvcli.documents.reading_order import CJK, RTL, Block, LinePiece, is_fixed, rows, running_on
from kvcli.documents.superscripts import joined

# Find line numbers in the margin, as in manuscripts and listings.

FEW = 3  # fewest numbers in a series
PROSE = 0.2  # share of the text lines beside them that must run on into the next line
MANUSCRIPT = 0.5  # the same share for lines in monospaced letters, which may be code
MOST = 0.8  # share of the numbers that must increase by one common step


def line_numbers(pieces: Sequence[LinePiece]) -> set[int]:
    """Return ids of line numbers: alone in a strip of the page, counting by one step, beside running text.

    Numbers of table rows, form entries or a table of contents are excluded: the lines beside them do not run on.
    """
    numbers = [p for p in pieces if p.text.isdecimal() and len(p.text) < 5]
    strips: list[list[LinePiece]] = []
    for number in sorted(numbers, key=lambda p: p.x0):
        if strips and number.x0 < max(p.x1 for p in strips[-1]):
            strips[-1].append(number)
        else:
            strips.append([number])
    found: set[int] = set()
    for strip in (sorted(strip, key=lambda p: p.base) for strip in strips if len(strip) >= FEW):
        left, right = min(p.x0 for p in strip), max(p.x1 for p in strip)
        own = found | {id(p) for p in strip}
        gone = own | {id(p) for p in pieces if not strip[0].y0 <= p.middle <= strip[-1].y1}
        is_alone = not any(p.x0 < right and p.x1 > left for p in pieces if id(p) not in gone)
        if is_alone and _counts(strip, rows(joined(pieces, gone))):
            found = own
    return found


def _counts(strip: Sequence[LinePiece], text: Block) -> bool:
    """True if the numbers increase by one step that matches the lines beside them."""
    steps = [int(b.text) - int(a.text) for a, b in itertools.pairwise(strip)]
    step = max(steps, key=steps.count)
    if step < 1 or not text or steps.count(step) < MOST * len(steps):
        return False
    if step > 1:
        return abs(len(text) - 1 - step * len(steps)) <= 0.2 * len(text)
    is_code = sum(is_fixed(row[0]) for row in text) > len(text) / 2
    return running_on(text) > (MANUSCRIPT if is_code else PROSE)


RUN = re.compile("[^\r\n\ufffe]+\ufffe?")  # a line as pdfium splits it, with the hyphen code at its end
INK = re.compile(rf"[^\s\ufffe{GONE}]")
INKED = re.compile(rf"{INK.pattern}(?:.*{INK.pattern})?", re.DOTALL)
STACKED = 3  # fewest characters below each other in a vertical line
WIDE = 1.0  # character width, in heights, from which a run is searched for gaps inside it
UNKNOWN = re.compile("[\ufffd\ue000-\uf8ff]")
COUNTED = re.compile(r" *\d{1,4} ")  # a line that may begin with its line number
DIGITS = re.compile(r"\d\d")  # the second digit may be lowered
JUMP = 0.28  # smallest rise of a raised word above the word before, in heights of the line
TALL = 0.34  # smallest height of a raised word, in the same unit: more than a dash, a comma or a quotation mark
DROP = 0.4  # smallest drop of the tops of lowered digits, in the same unit
STEP = 0.2  # smallest vertical step to a next character on another line, in character heights
RATIO = 0.87  # ratio of the heights of characters of two sizes
DOWN = 1  # rotation (in quarter turns) of text that is written downwards, lines from right to left
UNREADABLE = 0.3  # share of characters without a Unicode mapping from which a page is called garbled
MARGIN = 100.0  # points between the text of a page and text along its margin, which is read after it

_angle, _is_unknown = plain(raw.FPDFText_GetCharAngle), plain(raw.FPDFText_HasUnicodeMapError)
_count, _rect = plain(raw.FPDFText_CountRects), told(raw.FPDFText_GetRect, ctypes.c_double, (0, 3, 2, 1))
_room = told(raw.FPDFText_GetLooseCharBox, ctypes.c_float, range(1))
_origin = told(raw.FPDFText_GetCharOrigin, ctypes.c_double, range(2))


@dataclass(slots=True)
class Page:
    """The content of a page; empty if the page is broken."""

    number: int
    pieces: list[LinePiece] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    is_garbled: bool = False
    is_broken: bool = False
    is_picture: bool = False  # an image and no text, such as a scan
    is_hidden: bool = False  # some of its text is invisible
    is_cut: bool = False  # some of its text is beyond its edges
    has_more: bool = False  # a stamp or a file is attached to it


def read_page(document: Any, number: int, seen: VisiblePages) -> Page:
    """Read page `number`, counted from 1, of a `pypdfium2.PdfDocument`."""
    try:
        with closing(document[number - 1]) as page:
            found = Page(number, is_hidden=seen.switch_off(page))
            found.fields, typed, found.has_more = field_lines(document, page)
            with closing(page.get_textpage()) as text_page:
                text = _Text(text_page, page.get_bbox())
                pieces = _with_typed(list(text.pieces()), typed)
            unknown = max(text.unknown, len(UNKNOWN.findall(text.text)))
            found.is_cut, found.is_garbled = text.is_cut, unknown > UNREADABLE * len(text.text)
            found.pieces = _upright(joined(pieces, line_numbers(pieces)))
            images = () if found.pieces or found.fields else page.get_objects(filter=[raw.FPDF_PAGEOBJ_IMAGE])
            found.is_picture = any(True for _ in images)
            return found
    except pdfium.PdfiumError:
        return Page(number, is_broken=True)


def _with_typed(pieces: list[LinePiece], typed: Sequence[Typed]) -> list[LinePiece]:
    """Insert text typed onto the page: each line after the pieces to its left on the same row, or else last."""
    for text, (left, bottom, right, top) in typed:
        lines = [line for line in text.splitlines() if line.strip()]
        height = max((top - bottom) / len(lines), 1.0)
        for i, line in enumerate(lines):
            y0 = -top + i * height
            x1 = min(right, left + 0.5 * height * len(line))
            row = [k for k, p in enumerate(pieces, 1) if p.x1 <= left and y0 < p.middle < y0 + height]
            piece = LinePiece(line, left, y0, x1, y0 + height, height, base=y0 + height)
            pieces.insert(max(row, default=len(pieces)), piece)
    return pieces


def _upright(pieces: list[LinePiece]) -> list[LinePiece]:
    """Rotate pieces to the direction of most of them; place the pieces of each other direction above or below."""
    angles = dict.fromkeys(piece.angle for piece in pieces)
    if len(angles) < 2:
        return pieces
    main = max(angles, key=lambda angle: sum(len(p.text) for p in pieces if p.angle == angle))
    first = next(i for i, p in enumerate(pieces) if p.angle == main)
    groups: dict[int | None, list[LinePiece]] = {angle: [] for angle in (None, main, *angles)}
    for i, piece in enumerate(pieces):
        # with a rotated table, upright text drawn before it is placed above; a stamp along the margin is placed last
        groups[None if piece.angle == 0 and i < first else piece.angle].append(piece)
    found: list[LinePiece] = []
    for group in filter(None, groups.values()):
        shift = MARGIN + max(p.y1 for p in found) - min(p.y0 for p in group) if found else 0.0
        found += [replace(p, y0=p.y0 + shift, y1=p.y1 + shift) for p in group]
    return found


class _Text:
    """Characters of a page with their boxes."""

    def __init__(self, text_page: Any, view: Box) -> None:
        self.is_cut = False  # True if characters beyond the visible box were found
        self.unknown = 0  # characters whose font does not map them to Unicode
        self._page, self._views = handle(text_page), [_turn(view, angle) for angle in range(4)]
        n, text = text_page.count_chars(), text_page.get_text_range()
        if len(text) != n:  # without equal lengths, offsets in the text would not match characters on the page
            text = "".join(chr(raw.FPDFText_GetUnicode(text_page, i) or 32) for i in range(n)).replace("\x02", "\ufffe")
        self.text = with_accents(text, lambda i: ink(self._page, i))

    def pieces(self) -> Iterator[LinePiece]:
        """Yield the runs of the page, each as one piece or several."""
        for run in RUN.finditer(self.text):
            if inked := INKED.search(self.text, *run.span()):
                yield from self._run(*run.span(), inked.start(), inked.end() - 1)

    def _run(self, start: int, end: int, first: int, last: int) -> Iterator[LinePiece]:
        """Yield a run as one piece, or several if it turns, jumps over a gap or to another line, or changes size."""
        if _is_unknown(self._page, first):
            self.unknown += last + 1 - first
        angle, straight = self._angle(first), None
        if angle == 0 and self._is_stacked(start, end):
            straight = DOWN
        elif angle == self._angle(last):
            boxes = self._rects(start, end, angle)
            if not boxes or not (room := max(b[3] - b[1] for b in boxes)):
                return
            loose = sum(b[2] - b[0] for b in boxes) > WIDE * (end - start) * room
            if not loose and all(itertools.starmap(_goes_on, itertools.pairwise(boxes))):
                straight, view = angle, self._views[angle]
                in_view = _is_in(boxes[0], view) and view[0] <= boxes[0][0] and boxes[-1][2] <= view[2]
                if in_view and not (len(boxes) > 1 and self._is_uneven(first, end, boxes, room)):
                    yield from self._piece(start, end, boxes, angle)
                    return
        yield from self._letter_by_letter(start, end, straight)

    def _is_stacked(self, start: int, end: int) -> bool:
        """True if the characters are upright and below each other, as in vertical Chinese and Japanese."""
        n = len(CJK.findall(self.text, start, end))
        if n < STACKED or not (boxes := self._rects(start, end, 0)):
            return False
        x0, y0, x1, y1 = _around(boxes)
        return y1 - y0 > n / 2 * (x1 - x0)

    def _is_uneven(self, start: int, end: int, boxes: Sequence[Box], room: float) -> bool:
        """True if text in a run may be raised or lowered, or may be a line number."""
        pairs = [(a, b) if a[3] < b[3] else (b, a) for a, b in itertools.pairwise(boxes)]
        tall, top = TALL * room, min(b[1] for b in boxes)
        is_raised = any(low[3] - high[3] > JUMP * room and high[3] - high[1] > tall for high, low in pairs)
        is_lowered = any(b[1] - top > DROP * room and b[3] - b[1] > tall for b in boxes)
        has_digits = DIGITS.search(self.text, start, end) is not None
        return is_raised or (is_lowered and has_digits) or COUNTED.match(self.text, start, end) is not None

    def _letter_by_letter(self, start: int, end: int, straight: int | None) -> Iterator[LinePiece]:
        """Yield a run in pieces, split by position, size and direction (`straight`, if known) of each character."""
        boxes: list[Box] = []
        angle, is_same = DOWN, False
        for i in map(re.Match.start, INK.finditer(self.text, start, end)):
            turn = self._angle(i) if straight is None else straight
            box = self._letter(i, turn)
            is_out = not _is_in(box, self._views[turn])
            is_apart = bool(boxes) and (is_out or turn != angle or not _goes_on(boxes[-1], box))
            if boxes and (is_apart or self._changes(start, i, boxes[-1], box)):
                yield from self._piece(start, i, boxes, angle, is_same)
                start = i - 1 if self.text[i - 1] == " " and not is_apart else i
                boxes, is_same = [], not is_apart
            if is_out:
                self.is_cut, start = True, i + 1
            else:
                angle = turn
                boxes.append(box)
        if boxes:
            yield from self._piece(start, end, boxes, angle, is_same)

    def _changes(self, start: int, i: int, a: Box, b: Box) -> bool:
        """True if a character differs in size or height from the one before, or follows the line number."""
        ah, bh = a[3] - a[1], b[3] - b[1]
        if ah < RATIO * bh or bh < RATIO * ah or abs(b[3] - a[3]) > STEP * ah:
            return True
        return b[0] - a[2] > ah / 2 and self.text[start:i].strip().isdecimal()

    def _rects(self, start: int, end: int, angle: int) -> list[Box]:
        found = [_rect(self._page, i) for i in range(_count(self._page, start, end - start))]
        return [_turn(box, angle) for box in found if box]

    def _angle(self, i: int) -> int:
        """Return the rotation of a character in quarter turns."""
        turn: float = _angle(self._page, i)
        return round(2 * turn / math.pi) % 4 if turn else 0

    def _letter(self, i: int, angle: int) -> Box:
        """Return the loose box of a character, as its font defines it."""
        left, top, right, bottom = _room(self._page, i)
        return _turn((left, bottom, right, top), angle)

    def _piece(
        self, start: int, end: int, boxes: Sequence[Box], angle: int, is_same: bool = False
    ) -> Iterator[LinePiece]:
        """Yield a piece if it has readable text; the loose box of its first character gives the font size."""
        text, letters = self.text[start:end], INK.search(self.text, start, end)
        if letters and (found := clean(text.strip(" "))):
            first = letters.start()
            x0, y0, x1, y1 = _around(boxes)
            left, upper, right, lower = self._letter(first, angle)
            is_spaced = text.startswith(" ")
            if is_spaced and left > x0 and not RTL.search(text):
                x0 = left  # after its leading spaces
            base = _turn(_origin(self._page, first)[:2] * 2, angle)[3]
            yield LinePiece(found, x0, y0, x1, y1, lower - upper, is_spaced, right - left, angle, base, is_same)


def _around(boxes: Sequence[Box]) -> Box:
    lefts, tops, rights, bottoms = zip(*boxes, strict=True)
    return min(lefts), min(tops), max(rights), max(bottoms)


def _is_in(box: Box, view: Box) -> bool:
    """True if the middle of a box is visible."""
    x, y = box[0] + box[2], box[1] + box[3]
    return 2 * view[0] <= x <= 2 * view[2] and 2 * view[1] <= y <= 2 * view[3]


def _goes_on(a: Box, b: Box) -> bool:
    """True if a box continues the line of another: at the same height, without a wide gap."""
    height = max(a[3] - a[1], b[3] - b[1])
    is_near = b[0] - a[2] < 1.2 * height and a[0] - b[2] < 1.2 * height
    return is_near and a[3] - b[1] > -0.4 * height and b[3] - a[1] > -0.4 * height


def _turn(box: Box, angle: int) -> Box:
    """Convert page coordinates (y upwards) to coordinates along and down the text."""
    left, bottom, right, top = box
    return (
        (left, -top, right, -bottom),
        (-top, -right, -bottom, -left),
        (-right, bottom, -left, top),
        (bottom, left, top, right),
    )[angle]
