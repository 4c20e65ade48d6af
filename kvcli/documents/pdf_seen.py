"""Text of a PDF page that its reader does not see: without ink, in the colour of the page, covered, on a layer put off.

Every text object is asked for its mode and colour. Where that leaves a doubt, the page is drawn with and without the
doubtful objects: one that changes nothing is not seen. Objects that are not seen are switched off, so that a text page
made afterwards does not have them. Text without ink over a picture was recognised on a scan, and stays.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import IO, Any

import pypdfium2.raw as raw

PALE = 224  # of 255: a colour whose parts are all at least that may be the colour of the paper
ALIKE = 60  # difference of two colours, all parts together, up to which one may not be seen on the other
FAINT = 13  # of 255: opacity below which there is no ink
OPAQUE = 250  # of 255: opacity of an area that hides what is drawn before it
CHANGE = 10  # of 255: the change of a pixel that a reader sees
AREA = 6.0  # points that a filled path has at least each way to hide a letter
MOST = 100  # areas of a page that are looked at
DEEP = 8  # forms within forms
CELL = 6.0  # points: the places that visible text takes are squares of this size
PIXELS = 1000  # along the longer side of a page that is drawn
SECONDS = 10.0  # of the processor for drawing the pages of one file
BARE = (raw.FPDF_TEXTRENDERMODE_INVISIBLE, raw.FPDF_TEXTRENDERMODE_CLIP)
LAYER = re.compile(rb"/OC[\s/<]")  # in the dictionary of a form, which is never packed

Box = tuple[float, float, float, float]  # left, bottom, right, top


def quick(call: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function of pdfium on plain numbers; an object for every pointer costs more than the call."""
    return ctypes.CFUNCTYPE(result, *arguments)(ctypes.cast(call, ctypes.c_void_p).value or 0)


P, INT = ctypes.c_void_p, ctypes.c_int
_object, _inner = quick(raw.FPDFPage_GetObject, P, P, INT), quick(raw.FPDFFormObj_GetObject, P, P, INT)
_mode, _type = quick(raw.FPDFTextObj_GetTextRenderMode, INT, P), quick(raw.FPDFPageObj_GetType, INT, P)
_size, _marks = quick(raw.FPDFFormObj_CountObjects, INT, P), quick(raw.FPDFPageObj_CountMarks, INT, P)
_colour, _bounds = (quick(call, INT, *[P] * 5) for call in (raw.FPDFPageObj_GetFillColor, raw.FPDFPageObj_GetBounds))
_mark, _name = quick(raw.FPDFPageObj_GetMark, P, P, INT), quick(raw.FPDFPageObjMark_GetName, INT, P, P, INT, P)
_fill, _switch = quick(raw.FPDFPath_GetDrawMode, INT, P, P, P), quick(raw.FPDFPageObj_SetIsActive, INT, P, INT)
_drawn, _ink = quick(raw.FPDFText_GetTextObject, P, P, INT), quick(raw.FPDFText_GetCharBox, INT, P, INT, *[P] * 4)


@dataclass(slots=True)
class _Found:
    """The objects of a page, a number each, by what has to be known of them."""

    texts: dict[bytes, list[tuple[int, int]]]  # those with ink, by colour; before each its order, -1 in a form
    areas: list[tuple[int, bytes, Box]] = field(default_factory=list)
    pictures: list[Box] = field(default_factory=list)
    bare: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)


class Seen:
    """What is seen on the pages of a file. `is_complete` unless there was no time left to draw some."""

    def __init__(self, file: IO[bytes]) -> None:
        self.is_complete = True
        self._seconds = SECONDS
        file.seek(0)
        self._has_layers = any(LAYER.search(chunk) for chunk in iter(lambda: file.read(1 << 20), b""))
        self._out = (ctypes.c_uint * 4)()
        self._bytes, self._floats = memoryview(self._out).cast("B"), (ctypes.c_float * 4).from_buffer(self._out)
        self._at = [ctypes.addressof(self._out) + 4 * i for i in range(4)]

    def switch_off(self, page: Any) -> bool:
        """Switch off the texts of a page that are not seen; whether there were any."""
        handle, found = ctypes.cast(page.raw, P).value, _Found(defaultdict(list))
        self._look(found, lambda i: _object(handle, i), raw.FPDFPage_CountObjects(page), 0, False)
        doubtful = found.doubtful | set(self._hardly_seen(found))
        whole = page.get_width() * page.get_height()
        is_scan = not found.texts and any((b[2] - b[0]) * (b[3] - b[1]) > whole / 2 for b in found.pictures)
        if not doubtful and (not found.bare or is_scan):
            return False
        boxes = _boxes(page)
        taken = {cell for o in boxes.keys() - found.bare for box in boxes[o] for cell in _cells(box)}
        gone = {o for o in found.bare & boxes.keys() if not _is_recognised(boxes[o], found.pictures, taken)}
        for o in gone:
            _switch(o, 0)
        return bool(gone | self._without_effect(page, doubtful & boxes.keys(), boxes))

    def _look(self, found: _Found, get: Callable[[int], int], n: int, depth: int, is_doubtful: bool) -> None:
        out, at, texts = self._out, self._at, found.texts
        for i in range(n):
            o = get(i)
            mode = _mode(o)
            on_layer = is_doubtful or (_marks(o) > 0 and _is_on_layer(o))
            if mode < 0:
                self._look_at_shape(found, o, i, depth, on_layer)
                continue
            _colour(o, *at)
            if mode in BARE or out[3] < FAINT:
                found.bare.add(o)
                continue
            texts[self._bytes.tobytes()].append((-1 if depth else i, o))
            if on_layer:
                found.doubtful.add(o)

    def _look_at_shape(self, found: _Found, o: int, order: int, depth: int, on_layer: bool) -> None:
        kind = _type(o)
        if kind == raw.FPDF_PAGEOBJ_FORM and depth < DEEP:
            n = _size(o)
            self._look(found, lambda i: _inner(o, i), n, depth + 1, on_layer or self._has_layers)
            if not depth and any(_type(_inner(o, i)) == raw.FPDF_PAGEOBJ_IMAGE for i in range(n)):
                found.pictures.append(self._box(o))
        elif kind == raw.FPDF_PAGEOBJ_IMAGE and not depth:
            found.pictures.append(self._box(o))
        elif kind == raw.FPDF_PAGEOBJ_PATH and not depth and len(found.areas) < MOST:
            _fill(o, *self._at[:2])
            if self._out[0]:
                box = self._box(o)
                if min(box[2] - box[0], box[3] - box[1]) >= AREA:
                    _colour(o, *self._at)
                    found.areas.append((order, self._bytes.tobytes(), box))

    def _hardly_seen(self, found: _Found) -> Iterator[int]:
        """Texts in the colour of the paper or of an area, and those with an area drawn over them."""
        for colour, texts in found.texts.items():
            alike = [box for _, of, box in found.areas if _is_alike(of, colour)]
            if min(colour[0:12:4]) >= PALE:
                yield from (o for _, o in texts)
            elif found.areas:
                last = found.areas[-1][0]
                for order, o in texts:
                    if order < 0 and alike:
                        yield o
                    elif order >= 0 and (alike or order < last):
                        x0, y0, x1, y1 = self._box(o)
                        x, y = (x0 + x1) / 2, (y0 + y1) / 2
                        over = [b for at, of, b in found.areas if at > order and of[12] >= OPAQUE]
                        if any(b[0] < x < b[2] and b[1] < y < b[3] for b in (*alike, *over)):
                            yield o

    def _without_effect(self, page: Any, doubtful: set[int], boxes: dict[int, list[Box]]) -> set[int]:
        """Those of the texts without which the page looks the same; they are left switched off."""
        if not doubtful or self._seconds <= 0:
            self.is_complete &= not doubtful
            return set()
        began = time.process_time()
        before = self._shot(page)
        for o in doubtful:
            _switch(o, 0)
        after = self._shot(page)
        seen = {o for o in doubtful if any(_differ(page, before, after, box) for box in boxes[o])}
        for o in seen:
            _switch(o, 1)
        self._seconds -= time.process_time() - began
        return doubtful - seen

    def _shot(self, page: Any) -> Any:
        scale = PIXELS / max(page.get_width(), page.get_height())
        return page.render(scale=min(2.0, scale), may_draw_forms=False, draw_annots=False)

    def _box(self, o: int) -> Box:
        _bounds(o, *self._at)
        return tuple(self._floats)


def _is_alike(a: bytes, b: bytes) -> bool:
    return sum(abs(c - d) for c, d in zip(a[:12:4], b[:12:4], strict=True)) <= ALIKE


def _is_on_layer(o: int) -> bool:
    """Whether a mark of an object says that it is optional."""
    name, n = ctypes.create_string_buffer(16), ctypes.c_ulong()
    for i in range(_marks(o)):
        if _name(_mark(o, i), name, 16, ctypes.addressof(n)) and name.raw[: n.value] == b"O\0C\0\0\0":
            return True
    return False


def _boxes(page: Any) -> dict[int, list[Box]]:
    """What the letters of every text object blacken."""
    boxes, four = defaultdict(list), (ctypes.c_double * 4)()
    at = [ctypes.addressof(four) + 8 * i for i in (0, 2, 1, 3)]  # pdfium tells left, right, bottom, top
    with closing(page.get_textpage()) as text_page:
        handle = ctypes.cast(text_page.raw, P).value
        for i in range(text_page.count_chars()):
            if (o := _drawn(handle, i)) and _ink(handle, i, *at) and four[2] > four[0]:
                boxes[o].append(tuple(four))
    return boxes


def _cells(box: Box) -> Iterator[tuple[int, int]]:
    x = int((box[0] + box[2]) / 2 // CELL)
    return ((x + dx, y) for dx in (-1, 0, 1) for y in range(int(box[1] // CELL), int(box[3] // CELL) + 1))


def _is_recognised(boxes: list[Box], pictures: list[Box], taken: set[tuple[int, int]]) -> bool:
    """Whether letters lie on a picture, where no visible ones do."""
    middles = [((b[0] + b[2]) / 2, (b[1] + b[3]) / 2) for b in boxes]
    on = sum(any(p[0] < x < p[2] and p[1] < y < p[3] for p in pictures) for x, y in middles)
    under = sum((int(x // CELL), int(y // CELL)) in taken for x, y in middles)
    return on > len(boxes) / 2 > under


def _differ(page: Any, a: Any, b: Any, box: Box) -> bool:
    """Whether two drawings of a page differ in a box, to the eye."""
    x0, y0 = _pixel(page, a, box[0], box[3])
    x1, y1 = _pixel(page, a, box[2], box[1])
    (x0, x1), (y0, y1) = sorted((x0, x1)), sorted((y0, y1))
    left, right = max(0, x0) * a.n_channels, min(a.width, x1 + 1) * a.n_channels
    for y in range(max(0, y0) * a.stride, min(a.height, y1 + 1) * a.stride, a.stride):
        here, there = (bytes(shot.buffer[y + left : y + right]) for shot in (a, b))
        if here != there and max(abs(c - d) for c, d in zip(here, there, strict=True)) > CHANGE:
            return True
    return False


def _pixel(page: Any, shot: Any, x: float, y: float) -> tuple[int, int]:
    at = ctypes.c_int(), ctypes.c_int()
    raw.FPDF_PageToDevice(page, 0, 0, shot.width, shot.height, 0, x, y, *at)
    return at[0].value, at[1].value
