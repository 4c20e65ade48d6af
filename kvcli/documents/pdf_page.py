"""One page of a PDF: its pieces of text with their places, turned into the direction in which they are read."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from kvcli.documents.accents import GONE, with_accents
from kvcli.documents.lines import CJK, RTL, Piece
from kvcli.documents.margins import line_numbers
from kvcli.documents.pdf_fields import Typed, field_lines
from kvcli.documents.pdf_seen import INT, Box, P, Seen, quick
from kvcli.documents.raised import Part, joined, without
from kvcli.documents.repair import clean

SPLIT = re.compile("\r\n|\r|\n|\ufffe")
STACKED = 3  # letters that at least stand below each other in a vertical line
WIDE = 1.0  # width of a letter in heights from which on a run is looked at for gaps inside it
UNKNOWN = re.compile("[\ufffd\ue000-\uf8ff]+")
COUNTED = re.compile(r" *\d{1,4} ")  # a line that may begin with its number
DIGITS = re.compile(r"\d\d")  # of which the second may be lowered
JUMP = 0.28  # of the height of a line by which a word stands above the one before if it is raised
TALL = 0.34  # of that height that it has at least: more than a dash, a comma or a quotation mark
DROP = 0.4  # of that height by which the tops of lowered digits stand lower
STEP = 0.2  # heights of a letter by which the next stands above or below it if it is not on the same line
RATIO = 0.87  # of the heights of letters of two sizes
DOWN = 1  # quarters of a turn of text that is written downwards, lines from right to left
QUARTER = 1.5707963267948966  # of a turn, in radians
UNREADABLE = 0.3  # share of letters without a meaning in Unicode from which on a page is said to be garbled
MARGIN = 100.0  # points between the text of a page and what is written along its margin, read after it

_angle = quick(raw.FPDFText_GetCharAngle, ctypes.c_float, P, INT)
_map_error = quick(raw.FPDFText_HasUnicodeMapError, INT, P, INT)
_count, _rect = quick(raw.FPDFText_CountRects, INT, P, INT, INT), quick(raw.FPDFText_GetRect, INT, P, INT, *[P] * 4)
_loose = quick(raw.FPDFText_GetLooseCharBox, INT, P, INT, P)
_tight = quick(raw.FPDFText_GetCharBox, INT, P, INT, *[P] * 4)
_origin = quick(raw.FPDFText_GetCharOrigin, INT, P, INT, P, P)
Turned = tuple[int, Piece]  # quarters of a turn, and what is so turned


@dataclass(slots=True)
class Page:
    """What stands on a page; nothing on one that is broken."""

    number: int
    pieces: list[Piece] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    is_garbled: bool = False
    is_broken: bool = False
    is_picture: bool = False  # an image and no text, as a scan
    is_hidden: bool = False  # some of its text is not seen
    is_cut: bool = False  # some of its text is beyond its edges
    has_more: bool = False  # a stamp or a file is attached to it


def read_page(document: Any, number: int, seen: Seen) -> Page:
    """Page `number`, from 1, of a `pypdfium2.PdfDocument`."""
    try:
        page = document[number - 1]
    except pdfium.PdfiumError:
        return Page(number, is_broken=True)
    try:
        found = Page(number, is_hidden=seen.switch_off(page))
        found.fields, typed, found.has_more = field_lines(document, page)
        with closing(page.get_textpage()) as text_page:
            text, parts = _parts(text_page, page.get_bbox())
        found.is_cut, found.is_garbled = text.is_cut, text.unknown > UNREADABLE * len(text.text)
        found.pieces = _upright(_apart(_with_typed(parts, typed)))
        images = () if found.pieces or found.fields else page.get_objects(filter=[raw.FPDF_PAGEOBJ_IMAGE])
        found.is_picture = any(True for _ in images)
        return found
    except pdfium.PdfiumError:
        return Page(number, is_broken=True)
    finally:
        page.close()


def _parts(text_page: Any, view: Box) -> tuple[_Text, list[Part]]:
    n = max(0, text_page.count_chars())
    text = text_page.get_text_range() if n else ""
    if len(text) != n:  # then places in the text are not places on the page
        text = "".join(chr(raw.FPDFText_GetUnicode(text_page, i) or 32) for i in range(n)).replace("\x02", "\ufffe")
    unknown = sum(map(len, UNKNOWN.findall(text)))
    found = _Text(ctypes.cast(text_page.raw, P).value or 0, view)
    found.text = with_accents(text, found.ink)
    parts = [part for start, end in _runs(found.text) for part in found.parts(start, end)]
    found.unknown = max(unknown, found.unknown)
    return found, parts


def _with_typed(parts: list[Part], typed: Sequence[Typed]) -> list[Part]:
    """The parts with what was typed onto the page: each line behind what stands left of it on its row, else last."""
    for text, (left, bottom, right, top) in typed:
        lines = [line for line in text.splitlines() if line.strip()]
        height = max((top - bottom) / len(lines), 1.0)
        for i, line in enumerate(lines):
            y0 = -top + i * height
            x1 = min(right, left + 0.5 * height * len(line))
            part = Part(Piece(line, left, y0, x1, y0 + height, height), 0, y0 + height)
            row = [k for k, p in enumerate(parts, 1) if _is_beside(p.piece, part.piece)]
            parts.insert(max(row, default=len(parts)), part)
    return parts


def _is_beside(left: Piece, right: Piece) -> bool:
    return left.x1 <= right.x0 and right.y0 < left.middle < right.y1


def _apart(parts: list[Part]) -> list[Turned]:
    """Parts as pieces, less the numbers of lines in the margin."""
    numbers = line_numbers(parts)
    return joined(without(parts, numbers) if numbers else parts)


def _upright(found: Sequence[Turned]) -> list[Piece]:
    """The pieces in the direction of most of them, all others above or below, in an order of their own."""
    angles = dict.fromkeys(angle for angle, _ in found)
    if len(angles) < 2:
        return [piece for _, piece in found]
    main = max(angles, key=lambda angle: sum(len(p.text) for a, p in found if a == angle))
    first = next(i for i, (angle, _) in enumerate(found) if angle == main)
    # beside a table that is turned with its page, what runs above it is not; a stamp along the margin comes last
    above = [piece for angle, piece in found[:first] if angle == 0]
    groups = [[piece for angle, piece in found if angle == main]]
    for other in (angle for angle in angles if angle != main):
        groups.append([p for i, (angle, p) in enumerate(found) if angle == other and (angle or i > first)])
    pieces, floor = above, max((p.y1 for p in above), default=None)
    for group in filter(None, groups):
        shift = 0.0 if floor is None else floor + MARGIN - min(p.y0 for p in group)
        pieces += [replace(p, y0=p.y0 + shift, y1=p.y1 + shift) for p in group]
        floor = max(p.y1 for p in pieces)
    return pieces


def _runs(text: str) -> Iterator[tuple[int, int]]:
    """Lines as pdfium sees them, the sign for a hyphen at their end included."""
    start = 0
    for found in SPLIT.finditer(text):
        end = found.end() if found[0] == "\ufffe" else found.start()
        if end > start:
            yield start, end
        start = found.end()
    if start < len(text):
        yield start, len(text)


@dataclass(slots=True)
class _Text:
    """The letters of a page with their places."""

    page: int  # a text page of pdfium
    view: Box  # what is in view, y upwards
    text: str = ""
    is_cut: bool = False  # letters beyond it were found
    unknown: int = 0  # letters whose font does not say what they are
    _box: Any = field(default_factory=lambda: (ctypes.c_double * 4)())
    _room: Any = field(default_factory=lambda: (ctypes.c_float * 4)())

    def parts(self, start: int, end: int) -> Iterator[Part]:
        """One run as a part, or as several where it turns, jumps over a gap or to another line, or changes its size."""
        first, last = start, end - 1
        while first < end and _is_blank(self.text[first]):
            first += 1
        if first == end:
            return
        while _is_blank(self.text[last]):
            last -= 1
        if _map_error(self.page, first):
            self.unknown += last + 1 - first
        angle, straight = self._angle(first), None
        if angle == 0 and self._is_stacked(start, end):
            straight = DOWN
        elif angle == self._angle(last):
            boxes = self._rects(start, end - start, angle)
            if not boxes or not (room := max([b[3] - b[1] for b in boxes])):
                return
            loose = sum([b[2] - b[0] for b in boxes]) > WIDE * (end - start) * room
            letter, view = self._letter(first, angle), _turn(self.view, angle)
            if not loose and all(_goes_on(a, b) for a, b in itertools.pairwise(boxes)):
                straight = angle
                is_uneven = len(boxes) > 1 and self._is_uneven(first, end, boxes, room)
                in_view = _is_in(boxes[0], view) and view[0] <= boxes[0][0] and boxes[-1][2] <= view[2]
                if in_view and not is_uneven:
                    yield from self._part(self.text[start:end], boxes, letter, first, angle)
                    return
        yield from self._letter_by_letter(range(start, end), straight)

    def _is_stacked(self, start: int, end: int) -> bool:
        """Whether the letters stand upright below each other, as Chinese and Japanese do in vertical lines."""
        n = len(CJK.findall(self.text, start, end))
        if n < STACKED:
            return False
        boxes = self._rects(start, end - start, 0)
        width = max((b[2] for b in boxes), default=0.0) - min((b[0] for b in boxes), default=0.0)
        height = max((b[3] for b in boxes), default=0.0) - min((b[1] for b in boxes), default=0.0)
        return height > n / 2 * width

    def _is_uneven(self, start: int, end: int, boxes: Sequence[Box], room: float) -> bool:
        """Whether something may be raised or lowered in a run, or be the number of its line."""
        if COUNTED.match(self.text, start, end):
            return True
        has_digits = DIGITS.search(self.text, start, end) is not None
        for a, b in itertools.pairwise(boxes):
            rise = (a[3] - b[3]) / room
            high = b if rise > 0 else a
            if abs(rise) > JUMP and high[3] - high[1] > TALL * room:
                return True
        top = min([b[1] for b in boxes])
        return has_digits and any(b[1] - top > DROP * room and b[3] - b[1] > TALL * room for b in boxes)

    def _letter_by_letter(self, run: range, straight: int | None) -> Iterator[Part]:
        """A run in parts, by the place, the size and the direction (`straight`, if known) of every letter in view."""
        letters: list[str] = []
        boxes: list[Box] = []
        begin, angle, is_same, views = run.start, DOWN, False, dict[int, Box]()
        for i in run:
            if _is_blank(self.text[i]):
                letters.append(self.text[i])
                continue
            turn = self._angle(i) if straight is None else straight
            box = self._letter(i, turn)
            view = views.get(turn) or views.setdefault(turn, _turn(self.view, turn))
            is_out = not _is_in(box, view)
            is_apart = bool(boxes) and (is_out or turn != angle or not _goes_on(boxes[-1], box))
            if boxes and (is_apart or self._changes(letters, boxes[-1], box)):
                yield from self._part("".join(letters), boxes, boxes[0], begin, angle, is_same)
                letters, boxes, is_same = [" "] if letters[-1] == " " and not is_apart else [], [], not is_apart
            self.is_cut |= is_out
            if not is_out:
                begin = begin if boxes else i
                letters.append(self.text[i])
                boxes.append(box)
                angle = turn
        if boxes:
            yield from self._part("".join(letters), boxes, boxes[0], begin, angle, is_same)

    def _changes(self, letters: Sequence[str], a: Box, b: Box) -> bool:
        """Whether a letter is of another size or height than the one before, or comes after the number of its line."""
        ah, bh = a[3] - a[1], b[3] - b[1]
        if ah < RATIO * bh or bh < RATIO * ah or abs(b[3] - a[3]) > STEP * ah:
            return True
        return b[0] - a[2] > ah / 2 and "".join(letters).strip().isdecimal()

    def _rects(self, start: int, count: int, angle: int) -> list[Box]:
        page, box, at = self.page, self._box, ctypes.addressof(self._box)
        boxes = []
        for i in range(_count(page, start, count)):
            if _rect(page, i, at, at + 24, at + 16, at + 8):  # left, top, right, bottom
                boxes.append(_turn(tuple(box), angle))
        return boxes

    def _angle(self, i: int) -> int:
        """Quarters of a turn of a letter."""
        turn: float = _angle(self.page, i)
        return round(turn / QUARTER) % 4 if turn else 0

    def ink(self, i: int) -> Box:
        """What a letter blackens, y upwards."""
        at = ctypes.addressof(self._box)
        _tight(self.page, i, at, at + 16, at + 8, at + 24)
        return tuple(self._box)

    def _letter(self, i: int, angle: int) -> Box:
        """The place of a letter with the room its font gives it."""
        _loose(self.page, i, ctypes.addressof(self._room))
        left, top, right, bottom = self._room
        return _turn((left, bottom, right, top), angle)

    def _base(self, i: int, angle: int) -> float:
        """The line that a letter stands on, as far down the text."""
        at = ctypes.addressof(self._box)
        _origin(self.page, i, at, at + 8)
        x, y = self._box[:2]
        return _turn((x, y, x, y), angle)[3]

    def _part(
        self, text: str, boxes: Sequence[Box], letter: Box, first: int, angle: int, is_same: bool = False
    ) -> Iterator[Part]:
        """A part if there is anything to read; the room of one of its letters says the size of the font."""
        if found := clean(text.strip(" ")):
            x0, y0, x1, y1 = boxes[0]
            for a, b, c, d in boxes[1:]:
                x0, y0, x1, y1 = min(x0, a), min(y0, b), max(x1, c), max(y1, d)
            size, pitch = letter[3] - letter[1], letter[2] - letter[0]
            if text.startswith(" ") and letter[0] > x0 and not RTL.search(text):
                x0 = letter[0]  # behind the spaces it begins with
            piece = Piece(found, x0, y0, x1, y1, size, text.startswith(" "), pitch)
            yield Part(piece, angle, self._base(first, angle), is_same)


def _is_blank(sign: str) -> bool:
    return sign.isspace() or sign in ("\ufffe", GONE)


def _is_in(box: Box, view: Box) -> bool:
    """Whether the middle of a box is in view."""
    x, y = box[0] + box[2], box[1] + box[3]
    return 2 * view[0] <= x <= 2 * view[2] and 2 * view[1] <= y <= 2 * view[3]


def _goes_on(a: Box, b: Box) -> bool:
    """Whether a box continues the line of another: at the same height, without a wide gap."""
    ah, bh = a[3] - a[1], b[3] - b[1]
    height = ah if ah > bh else bh
    if b[0] - a[2] >= 1.2 * height or a[0] - b[2] >= 1.2 * height:
        return False
    return (a[3] if a[3] < b[3] else b[3]) - (a[1] if a[1] > b[1] else b[1]) > -0.4 * height


def _turn(box: Box, angle: int) -> Box:
    """From points on the page, y upwards, to points along and down the text."""
    left, bottom, right, top = box
    if angle == 0:
        return left, -top, right, -bottom
    if angle == DOWN:
        return -top, -right, -bottom, -left
    if angle == 2:
        return -right, bottom, -left, top
    return bottom, left, top, right
