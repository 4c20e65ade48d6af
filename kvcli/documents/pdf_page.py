"""One page of a PDF: its pieces of text with their places, turned into the direction in which they are read."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from kvcli.documents.accents import GONE, with_accents
from kvcli.documents.lines import CJK, Piece
from kvcli.documents.pdf_fields import field_lines
from kvcli.documents.repair import clean

SPLIT = re.compile("\r\n|\r|\n|\ufffe")
STACKED = 3  # letters that at least stand below each other in a vertical line
WIDE = 1.0  # width of a letter in heights from which on a run is looked at for gaps inside it
UNKNOWN = re.compile("[\ufffd\ue000-\uf8ff]+")
DOWN = 1  # quarters of a turn of text that is written downwards, lines from right to left
QUARTER = 1.5707963267948966  # of a turn, in radians
UNREADABLE = 0.3  # share of letters without a meaning in Unicode from which on a page is said to be garbled
MARGIN = 100.0  # points between the text of a page and what is written along its margin, read after it

Box = tuple[float, float, float, float]
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


def read_page(document: Any, number: int) -> Page:
    """Page `number`, from 1, of a `pypdfium2.PdfDocument`."""
    try:
        page = document[number - 1]
    except pdfium.PdfiumError:
        return Page(number, is_broken=True)
    try:
        text_page = page.get_textpage()
        try:
            pieces, is_garbled = _pieces(text_page)
        finally:
            text_page.close()
        fields = field_lines(document, page)
        images = () if pieces or fields else page.get_objects(filter=[raw.FPDF_PAGEOBJ_IMAGE])
        return Page(number, pieces, fields, is_garbled, is_picture=any(True for _ in images))
    except pdfium.PdfiumError:
        return Page(number, is_broken=True)
    finally:
        page.close()


def _pieces(text_page: Any) -> tuple[list[Piece], bool]:
    n = text_page.count_chars()
    if n <= 0:
        return [], False
    text = text_page.get_text_range()
    if len(text) != n:  # then places in the text are not places on the page
        text = "".join(chr(raw.FPDFText_GetUnicode(text_page, i) or 32) for i in range(n))
    unknown = sum(map(len, UNKNOWN.findall(text)))
    text = with_accents(text, lambda i: _ink(text_page, i))
    found = [piece for start, end in _runs(text) for piece in _split(text_page, text, start, end)]
    return _upright(found), unknown > UNREADABLE * n


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


def _is_stacked(text_page: Any, text: str, start: int, end: int) -> bool:
    """Whether the letters stand upright below each other, as Chinese and Japanese do in vertical lines."""
    n = len(CJK.findall(text, start, end))
    if n < STACKED:
        return False
    boxes = _rects(text_page, start, end - start, 0)
    width = max((b[2] for b in boxes), default=0.0) - min((b[0] for b in boxes), default=0.0)
    height = max((b[3] for b in boxes), default=0.0) - min((b[1] for b in boxes), default=0.0)
    return height > n / 2 * width


def _split(text_page: Any, text: str, start: int, end: int) -> Iterator[Turned]:
    """One run as a piece, or as several where it turns, or jumps over a gap or to another line."""
    first = next((i for i in range(start, end) if not _is_blank(text[i])), None)
    if first is None:
        return
    last = next(i for i in range(end - 1, -1, -1) if not _is_blank(text[i]))
    angle = _angle(text_page, first)
    if angle == 0 and _is_stacked(text_page, text, start, end):
        angle = DOWN
    elif angle == _angle(text_page, last):
        boxes = _rects(text_page, start, end - start, angle)
        loose = sum(b[2] - b[0] for b in boxes) > WIDE * (end - start) * max((b[3] - b[1] for b in boxes), default=0.0)
        if not loose and all(_goes_on(a, b) for a, b in itertools.pairwise(boxes)):
            if boxes:
                for piece in _piece(text[start:end], boxes, _letter(text_page, first, angle)):
                    yield angle, piece
            return
    yield from _letter_by_letter(text_page, text, range(start, end), angle == DOWN)


def _letter_by_letter(text_page: Any, text: str, run: range, is_stacked: bool) -> Iterator[Turned]:
    """A run in pieces, by the place and the direction of every letter."""
    letters: list[str] = []
    boxes: list[Box] = []
    angle = DOWN
    for i in run:
        if _is_blank(text[i]):
            letters.append(text[i])
            continue
        turn = DOWN if is_stacked else _angle(text_page, i)
        box = _letter(text_page, i, turn)
        if boxes and not (turn == angle and _goes_on(boxes[-1], box)):
            yield from ((angle, piece) for piece in _piece("".join(letters), boxes, boxes[0]))
            letters, boxes = [], []
        letters.append(text[i])
        boxes.append(box)
        angle = turn
    if boxes:
        yield from ((angle, piece) for piece in _piece("".join(letters), boxes, boxes[0]))


def _is_blank(sign: str) -> bool:
    return sign.isspace() or sign in ("\ufffe", GONE)


def _piece(text: str, boxes: Sequence[Box], letter: Box) -> list[Piece]:
    """A piece if there is anything to read; the room of one of its letters says the size of the font."""
    found = clean(text.strip(" "))
    x0, y0 = min(b[0] for b in boxes), min(b[1] for b in boxes)
    x1, y1 = max(b[2] for b in boxes), max(b[3] for b in boxes)
    return [Piece(found, x0, y0, x1, y1, letter[3] - letter[1], text.startswith(" "))] if found else []


def _goes_on(a: Box, b: Box) -> bool:
    """Whether a box continues the line of another: at the same height, without a wide gap."""
    height = max(a[3] - a[1], b[3] - b[1])
    shared = min(a[3], b[3]) - max(a[1], b[1])
    return max(b[0] - a[2], a[0] - b[2]) < 1.2 * height and shared > -0.4 * height


def _rects(text_page: Any, start: int, count: int, angle: int) -> list[Box]:
    left, top, right, bottom = (ctypes.c_double() for _ in range(4))
    boxes = []
    for i in range(raw.FPDFText_CountRects(text_page, start, count)):
        if raw.FPDFText_GetRect(text_page, i, left, top, right, bottom):
            boxes.append(_turn((left.value, bottom.value, right.value, top.value), angle))
    return boxes


def _angle(text_page: Any, i: int) -> int:
    """Quarters of a turn of a letter."""
    turn: float = raw.FPDFText_GetCharAngle(text_page, i)
    return round(turn / QUARTER) % 4


def _ink(text_page: Any, i: int) -> Box:
    """What a letter blackens, y upwards."""
    left, right, bottom, top = (ctypes.c_double() for _ in range(4))
    raw.FPDFText_GetCharBox(text_page, i, left, right, bottom, top)
    return left.value, bottom.value, right.value, top.value


def _letter(text_page: Any, i: int, angle: int) -> Box:
    """The place of a letter with the room its font gives it."""
    box = raw.FS_RECTF()
    raw.FPDFText_GetLooseCharBox(text_page, i, box)
    return _turn((box.left, box.bottom, box.right, box.top), angle)


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
