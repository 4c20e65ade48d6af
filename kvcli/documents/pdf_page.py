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


@dataclass(slots=True)
class Page:
    """What stands on a page; nothing on one that is broken."""

    number: int
    pieces: list[Piece] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    is_garbled: bool = False
    is_broken: bool = False


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
        return Page(number, pieces, field_lines(document, page), is_garbled)
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
    turned: dict[int, list[Piece]] = {}
    for start, end in _runs(text):
        first = next((i for i in range(start, end) if not text[i].isspace()), None)
        if first is None:
            continue
        angle = round(raw.FPDFText_GetCharAngle(text_page, first) / QUARTER) % 4
        if angle == 0 and _is_stacked(text_page, text, start, end):
            angle = DOWN
        turned.setdefault(angle, []).extend(_split(text_page, text, start, end, angle))
    if not turned:
        return [], False
    main = max(turned, key=lambda angle: sum(len(p.text) for p in turned[angle]))
    pieces = turned.pop(main)
    floor = max((p.y1 for p in pieces), default=0.0)
    for other in turned.values():  # a stamp along the margin, axis labels: after the text, in an order of their own
        top = min(p.y0 for p in other)
        shift = floor + MARGIN - top
        pieces += [replace(p, y0=p.y0 + shift, y1=p.y1 + shift) for p in other]
        floor = max(p.y1 for p in pieces)
    return pieces, unknown > UNREADABLE * n


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


def _split(text_page: Any, text: str, start: int, end: int, angle: int) -> list[Piece]:
    """One run as a piece, or as several where it jumps over a gap or to another line."""
    boxes = _rects(text_page, start, end - start, angle)
    if not boxes:
        return []
    loose = sum(b[2] - b[0] for b in boxes) > WIDE * (end - start) * max(b[3] - b[1] for b in boxes)
    if not loose and all(_goes_on(a, b) for a, b in itertools.pairwise(boxes)):
        first = next(i for i in range(start, end) if not text[i].isspace())
        return _piece(text[start:end], boxes, _letter(text_page, first, angle))
    return list(_letter_by_letter(text_page, text, range(start, end), angle))


def _letter_by_letter(text_page: Any, text: str, run: range, angle: int) -> Iterator[Piece]:
    """A run in pieces, by the place of every letter."""
    letters: list[str] = []
    boxes: list[Box] = []
    for i in run:
        if text[i].isspace() or text[i] == "\ufffe":
            letters.append(text[i])
            continue
        box = _letter(text_page, i, angle)
        if boxes and not _goes_on(boxes[-1], box):
            yield from _piece("".join(letters), boxes, boxes[0])
            letters, boxes = [], []
        letters.append(text[i])
        boxes.append(box)
    if boxes:
        yield from _piece("".join(letters), boxes, boxes[0])


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
