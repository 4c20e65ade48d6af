"""PDF by pdfium, page by page: pieces of text with their places, then order, running lines and words put right."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import IO, Any

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from kvcli.documents.document import Section
from kvcli.documents.edges import without_running
from kvcli.documents.lines import Piece, paragraphs, reading_order
from kvcli.documents.pages import chosen, listed
from kvcli.documents.parsed import Job, Parsed, damaged, no_text, refuse_too_much
from kvcli.documents.pdf_fields import field_lines
from kvcli.documents.pdf_open import open_pdf
from kvcli.documents.repair import Words, clean, mended

NEAR = 8  # pages around the chosen ones that are looked at too, to know what runs along the edges
SPLIT = re.compile("\r\n|\r|\n|\ufffe")
WIDE = 1.0  # width of a letter in heights from which on a run is looked at for gaps inside it
UNKNOWN = re.compile("[\ufffd\ue000-\uf8ff]+")
QUARTER = 1.5707963267948966
UNREADABLE = 0.3  # share of letters without a meaning in Unicode from which on a page is said to be garbled


def read(file: IO[bytes], job: Job) -> Parsed:
    """The chosen pages as sections; those without text are listed."""
    document = open_pdf(file, job)
    n_pages = len(document)
    if not n_pages:
        raise damaged(job.name, "a PDF", "it has no pages")
    refuse_too_much(job.name, 0, 0 if job.spans else n_pages)
    wanted = chosen(job.spans, n_pages, job.name) if job.spans else list(range(1, n_pages + 1))
    around = sorted(
        {n for page in _ends(wanted) for n in range(page - NEAR, page + NEAR + 1) if 0 < n <= n_pages} | set(wanted)
    )
    pages: list[tuple[int, list[Piece]]] = []
    fields: dict[int, list[str]] = {}
    garbled: list[int] = []
    broken: list[int] = []
    size = 0
    for number in around:
        try:
            pieces, extra, is_garbled = _page(document, number - 1)
        except pdfium.PdfiumError:
            pieces, extra, is_garbled = [], [], False
            broken.append(number)
        size += sum(len(p.text) for p in pieces)
        refuse_too_much(job.name, size, len(pages))
        pages.append((number, pieces))
        fields[number] = extra
        if is_garbled:
            garbled.append(number)
    words = Words()
    for _, pieces in pages:
        words.add(p.text for p in pieces)
    sections, without = [], []
    asked = set(wanted)
    for (number, _), pieces in zip(pages, list(without_running(pages)), strict=True):
        if number not in asked:
            continue
        text = _text(pieces, fields[number], words)
        if text:
            sections.append(Section(number, str(number), text))
        else:
            without.append(number)
    if not sections:
        raise _nothing(job, len(wanted), len(broken))
    parsed = Parsed("pdf", "page", sections, title=_title(document), n_pages=n_pages, without_text=without)
    if bad := [n for n in garbled if n in asked]:
        parsed.notes.append(f"a font on pages {listed(bad)} does not say which letters it draws: parts are unreadable")
    if bad := [n for n in broken if n in asked]:
        parsed.notes.append(f"pages {listed(bad)} are damaged and could not be read")
    return parsed


def _ends(wanted: Sequence[int]) -> set[int]:
    return {wanted[0], wanted[-1]} if wanted else set()


def _nothing(job: Job, asked: int, broken: int) -> Exception:
    if broken == asked:
        return damaged(job.name, "a PDF", "none of its pages can be read")
    error = no_text(job.name, f"none of its {asked:,} pages has a text layer: they look scanned")
    error.try_ = ("a copy that went through text recognition (OCR), as ocrmypdf makes",)
    return error


def _text(pieces: Sequence[Piece], fields: Sequence[str], words: Words) -> str:
    parts = paragraphs(reading_order(pieces)) if pieces else []
    if fields:
        parts.append(list(fields))
    return mended(parts, words).strip()


def _title(document: Any) -> str | None:
    title = " ".join(clean(document.get_metadata_value("Title") or "").split())
    return title if title and title.casefold() not in ("untitled", "(anonymous)") else None


def _page(document: Any, index: int) -> tuple[list[Piece], list[str], bool]:
    """The pieces of a page in the direction of its text, its form fields, and whether letters are unknown."""
    page = document[index]
    try:
        text_page = page.get_textpage()
        try:
            found, garbled = _pieces(text_page)
        finally:
            text_page.close()
        return found, field_lines(document, page), garbled
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
        turned.setdefault(angle, []).extend(_split(text_page, text, start, end, angle))
    if not turned:
        return [], False
    main = max(turned, key=lambda angle: sum(len(p.text) for p in turned[angle]))
    pieces = turned.pop(main)
    floor = max((p.y1 for p in pieces), default=0.0)
    for other in turned.values():  # a stamp along the margin, axis labels: after the text, in an order of their own
        top = min(p.y0 for p in other)
        shift = floor + 100 - top
        pieces += [Piece(p.text, p.x0, p.y0 + shift, p.x1, p.y1 + shift) for p in other]
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


def _split(text_page: Any, text: str, start: int, end: int, angle: int) -> list[Piece]:
    """One run as a piece, or as several where it jumps over a gap or to another line."""
    boxes = _rects(text_page, start, end - start, angle)
    if not boxes:
        return []
    loose = sum(b[2] - b[0] for b in boxes) > WIDE * (end - start) * max(b[3] - b[1] for b in boxes)
    if not loose and all(_goes_on(a, b) for a, b in itertools.pairwise(boxes)):
        found = clean(text[start:end].strip(" "))
        return [_piece(found, boxes)] if found else []
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
            if found := clean("".join(letters).strip(" ")):
                yield _piece(found, boxes)
            letters, boxes = [], []
        letters.append(text[i])
        boxes.append(box)
    if boxes and (found := clean("".join(letters).strip(" "))):
        yield _piece(found, boxes)


Box = tuple[float, float, float, float]


def _piece(text: str, boxes: Sequence[Box]) -> Piece:
    return Piece(
        text, min(b[0] for b in boxes), min(b[1] for b in boxes), max(b[2] for b in boxes), max(b[3] for b in boxes)
    )


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
    if angle == 1:  # written downwards
        return -top, -right, -bottom, -left
    if angle == 2:
        return -right, bottom, -left, top
    return bottom, left, top, right
