"""Detect invisible text of a PDF page: without ink, in the page colour, covered, or on a disabled layer.

The mode and colour of each text object are read. In doubtful cases the page is drawn with and without the doubtful
objects: an object that changes no pixel is invisible. Invisible objects are switched off, so that a text page created
afterwards does not contain them. Text without ink over a picture is OCR text of a scan, and is kept.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import IO, Any

import pypdfium2.raw as raw

from kvcli.documents.pdf_calls import Box, handle, ink, plain, told

PALE = 224  # of 255: a colour with all components at least this may be the paper colour
ALIKE = 60  # difference of two colours, summed over components, up to which one may be invisible on the other
FAINT = 13  # of 255: opacity below which there is no ink
OPAQUE = 250  # of 255: opacity of an area that hides objects drawn before it
CHANGE = 10  # of 255: smallest visible change of a pixel
AREA = 6.0  # smallest width and height, in points, of a filled path that can hide a character
MOST = 100  # areas of a page that are examined
DEEP = 8  # nesting depth of forms
CELL = 6.0  # points: side of the grid squares that mark visible text
PIXELS = 1000  # along the longer side of a drawn page
SECONDS = 10.0  # processor seconds for drawing pages of one file
BARE = (raw.FPDF_TEXTRENDERMODE_INVISIBLE, raw.FPDF_TEXTRENDERMODE_CLIP)
LAYER = re.compile(rb"/OC[\s/<]")  # in the dictionary of a form, which is never compressed
INK = (0, 0, 0, 255)  # stands for the colour of a pattern

Colour = tuple[int, int, int, int]  # red, green, blue, opacity
_object, _inner = plain(raw.FPDFPage_GetObject), plain(raw.FPDFFormObj_GetObject)
_size, _type = plain(raw.FPDFFormObj_CountObjects), plain(raw.FPDFPageObj_GetType)
_mode, _switch = plain(raw.FPDFTextObj_GetTextRenderMode), plain(raw.FPDFPageObj_SetIsActive)
_marks, _mark = plain(raw.FPDFPageObj_CountMarks), plain(raw.FPDFPageObj_GetMark)
_name, _drawn = plain(raw.FPDFPageObjMark_GetName), plain(raw.FPDFText_GetTextObject)
_colour, _box = told(raw.FPDFPageObj_GetFillColor, ctypes.c_uint), told(raw.FPDFPageObj_GetBounds, ctypes.c_float)
_fill = told(raw.FPDFPath_GetDrawMode, ctypes.c_int, range(2))


class VisiblePages:
    """Visible text of the pages of a file. `is_complete` is False if time ran out before all pages were drawn."""

    def __init__(self, file: IO[bytes]) -> None:
        self.is_complete = True
        self._seconds = SECONDS
        file.seek(0)
        self._has_layers = any(LAYER.search(chunk) for chunk in iter(lambda: file.read(1 << 20), b""))

    def switch_off(self, page: Any) -> bool:
        """Switch off the invisible text objects of a page; return True if there were any."""
        texts = defaultdict[Colour, list[tuple[int, int]]](list)  # text objects with ink, each after its drawing order
        areas, pictures = list[tuple[int, Colour, Box]](), list[Box]()
        bare, doubtful = set[int](), set[int]()
        for order, o, mode, on_layer in self._objects(handle(page), raw.FPDFPage_CountObjects(page), _object):
            if mode >= 0:
                colour = _colour(o) or INK
                if mode in BARE or colour[3] < FAINT:
                    bare.add(o)
                else:
                    texts[colour].append((order, o))
                    if on_layer:
                        doubtful.add(o)
            elif order >= 0 and _is_picture(o):
                pictures.append(_box(o))
            elif order >= 0 and len(areas) < MOST and _is_area(o):
                areas.append((order, _colour(o) or INK, _box(o)))
        doubtful |= set(_hardly_seen(texts, areas))
        whole = page.get_width() * page.get_height()
        is_scan = not texts and any((b[2] - b[0]) * (b[3] - b[1]) > whole / 2 for b in pictures)
        if not doubtful and (not bare or is_scan):
            return False
        boxes = _boxes(page)
        taken = {cell for o in boxes.keys() - bare for box in boxes[o] for cell in _cells(box)}
        gone = {o for o in bare & boxes.keys() if not _is_recognised(boxes[o], pictures, taken)}
        for o in gone:
            _switch(o, 0)
        return bool(gone | self._without_effect(page, doubtful & boxes.keys(), boxes))

    def _objects(
        self, of: int, n: int, get: Callable[[int, int], int], depth: int = 0, is_doubtful: bool = False
    ) -> Iterator[tuple[int, int, int, bool]]:
        """Yield objects of a page and its forms: order (-1 in a form), pointer, text mode, and whether on a layer."""
        for i in range(n):
            o = get(of, i)
            mode = _mode(o)
            on_layer = is_doubtful or (_marks(o) > 0 and _is_on_layer(o))
            yield -1 if depth else i, o, mode, on_layer
            if mode < 0 and depth < DEEP and (inner := _size(o)) > 0:
                yield from self._objects(o, inner, _inner, depth + 1, on_layer or self._has_layers)

    def _without_effect(self, page: Any, doubtful: set[int], boxes: dict[int, list[Box]]) -> set[int]:
        """Return the text objects whose removal leaves the page unchanged; they are left switched off."""
        if not doubtful or self._seconds <= 0:
            self.is_complete &= not doubtful
            return set()
        began = time.process_time()
        before = _shot(page)
        for o in doubtful:
            _switch(o, 0)
        after = _shot(page)
        seen = {o for o in doubtful if any(_differ(page, before, after, box) for box in boxes[o])}
        for o in seen:
            _switch(o, 1)
        self._seconds -= time.process_time() - began
        return doubtful - seen


def _is_picture(o: int) -> bool:
    """True if an object is an image, or a form that draws one."""
    return raw.FPDF_PAGEOBJ_IMAGE in (_type(o), *(_type(_inner(o, i)) for i in range(_size(o))))


def _is_area(o: int) -> bool:
    """True if an object is a filled path that may hide a character."""
    if _type(o) != raw.FPDF_PAGEOBJ_PATH or not _fill(o)[0]:
        return False
    left, bottom, right, top = _box(o)
    return bool(min(right - left, top - bottom) >= AREA)


def _hardly_seen(texts: dict[Colour, list[tuple[int, int]]], areas: list[tuple[int, Colour, Box]]) -> Iterator[int]:
    """Yield text objects in the colour of the paper or of an area, and text objects with an area drawn over them."""
    for colour, drawn in texts.items():
        alike = [box for _, of, box in areas if sum(abs(of[i] - colour[i]) for i in range(3)) <= ALIKE]
        is_pale = min(colour[:3]) >= PALE
        for order, o in drawn:
            if is_pale or (order < 0 and alike):
                yield o
            elif areas and order >= 0:
                over = alike + [box for at, of, box in areas if at > order and of[3] >= OPAQUE]
                if over and _is_on(_box(o), over):
                    yield o


def _is_on(box: Box, areas: list[Box]) -> bool:
    """True if the middle of a box is in one of the areas."""
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return any(a[0] < x < a[2] and a[1] < y < a[3] for a in areas)


def _is_on_layer(o: int) -> bool:
    """True if a mark of an object declares it optional content."""
    name, n = ctypes.create_string_buffer(16), ctypes.c_ulong()
    for i in range(_marks(o)):
        if _name(_mark(o, i), name, 16, ctypes.addressof(n)) and name.raw.startswith(b"O\0C\0\0\0"):
            return True
    return False


def _boxes(page: Any) -> dict[int, list[Box]]:
    """Return the ink boxes of the characters of each text object."""
    boxes = defaultdict[int, list[Box]](list)
    with closing(page.get_textpage()) as text_page:
        text = handle(text_page)
        for i in range(text_page.count_chars()):
            if (o := _drawn(text, i)) and (box := ink(text, i)) and box[2] > box[0]:
                boxes[o].append(box)
    return boxes


def _cells(box: Box) -> Iterator[tuple[int, int]]:
    x = int((box[0] + box[2]) / 2 // CELL)
    return ((x + dx, y) for dx in (-1, 0, 1) for y in range(int(box[1] // CELL), int(box[3] // CELL) + 1))


def _is_recognised(boxes: list[Box], pictures: list[Box], taken: set[tuple[int, int]]) -> bool:
    """True if most characters are on a picture, and most are not where visible characters are."""
    cells = [(int((b[0] + b[2]) / 2 // CELL), int((b[1] + b[3]) / 2 // CELL)) for b in boxes]
    return sum(_is_on(box, pictures) for box in boxes) > len(boxes) / 2 > sum(cell in taken for cell in cells)


def _shot(page: Any) -> Any:
    scale = PIXELS / max(page.get_width(), page.get_height())
    return page.render(scale=min(2.0, scale), may_draw_forms=False, draw_annots=False)


def _differ(page: Any, a: Any, b: Any, box: Box) -> bool:
    """True if two drawings of a page differ visibly in a box."""
    place = a.get_posconv(page)
    (x0, x1), (y0, y1) = map(sorted, zip(place.to_bitmap(*box[:2]), place.to_bitmap(*box[2:]), strict=True))
    left, right = max(0, x0) * a.n_channels, min(a.width, x1 + 1) * a.n_channels
    for start in range(max(0, y0) * a.stride, min(a.height, y1 + 1) * a.stride, a.stride):
        here, there = (shot.buffer[start + left : start + right] for shot in (a, b))
        if here != there and max(abs(c - d) for c, d in zip(here, there, strict=True)) > CHANGE:
            return True
    return False
