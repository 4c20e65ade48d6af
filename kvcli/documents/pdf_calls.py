"""Call pdfium with plain integers as pointers: a ctypes object per pointer costs more than the call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pypdfium2.raw as raw

from kvcli.documents.dehyphenate import SOFT, clean

Box = tuple[float, float, float, float]  # left, bottom, right, top


def handle(of: Any) -> int:
    """Return the integer pointer of a pdfium page or text page."""
    return ctypes.cast(of.raw, ctypes.c_void_p).value or 0


def plain(call: Any) -> Callable[..., Any]:
    """Return the function with integers in place of pointers."""
    kinds = [ctypes.c_void_p if hasattr(kind, "contents") else kind for kind in (call.restype, *call.argtypes)]
    return ctypes.CFUNCTYPE(*kinds)(ctypes.cast(call, ctypes.c_void_p).value or 0)


def told(call: Any, kind: Any, order: Sequence[int] = range(4)) -> Callable[..., Any]:
    """Return the function with its output parameters as its result: four numbers of type `kind`, or () on failure.

    Output i is written to index `order[i]`. All calls write to the same buffer, so only one thread at a time may call
    it.
    """
    function, answers = plain(call), (kind * 4)()
    at = [ctypes.addressof(answers) + i * ctypes.sizeof(kind) for i in order]
    return lambda *about: tuple(answers[:]) if function(*about, *at) else ()


ink = told(raw.FPDFText_GetCharBox, ctypes.c_double, (0, 2, 1, 3))  # ink box of a character of a text page


# Annotations of a PDF page: filled form fields, one line each, and text that was typed onto the page.

MOST = 2000  # fields of one page; a form for people has fewer
LONGEST = 1 << 16  # bytes of one value
TICKED = (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON)
VALUED = (raw.FPDF_FORMFIELD_TEXTFIELD, raw.FPDF_FORMFIELD_COMBOBOX, raw.FPDF_FORMFIELD_LISTBOX)
Typed = tuple[str, tuple[float, float, float, float]]  # text, and its box: left, bottom, right, top
UNSEEN = raw.FPDF_ANNOT_FLAG_HIDDEN | raw.FPDF_ANNOT_FLAG_NOVIEW
UNREAD = (raw.FPDF_ANNOT_STAMP, raw.FPDF_ANNOT_FILEATTACHMENT)


def field_lines(document: Any, page: Any) -> tuple[list[str], list[Typed], bool]:
    """Return `name: value` of each filled field, text typed onto the page, and whether a stamp or file is attached."""
    lines, typed, has_more = list[str](), list[Typed](), False
    for i in range(min(MOST, raw.FPDFPage_GetAnnotCount(page))):
        annotation = raw.FPDFPage_GetAnnot(page, i)
        if not annotation:
            continue
        try:
            kind = raw.FPDFAnnot_GetSubtype(annotation)
            if kind == raw.FPDF_ANNOT_WIDGET and document.formenv is not None:
                lines += _line(document.formenv, annotation)
            elif not raw.FPDFAnnot_GetFlags(annotation) & UNSEEN:
                typed += _typed(annotation) if kind == raw.FPDF_ANNOT_FREETEXT else []
                has_more |= kind in UNREAD
        finally:
            raw.FPDFPage_CloseAnnot(annotation)
    return lines, typed, has_more


def _typed(annotation: Any) -> list[Typed]:
    """Return the text that an annotation shows on the page."""
    place = raw.FS_RECTF()
    text = _string(raw.FPDFAnnot_GetStringValue, annotation, b"Contents")
    if not text.strip() or not raw.FPDFAnnot_GetRect(annotation, place):
        return []
    return [(text, (place.left, place.bottom, place.right, place.top))]


def _line(form: Any, annotation: Any) -> list[str]:
    def field(call: Callable[..., int]) -> str:
        return " ".join(_string(call, form, annotation).split())

    kind, value = raw.FPDFAnnot_GetFormFieldType(form, annotation), ""
    if kind in VALUED:
        value = field(raw.FPDFAnnot_GetFormFieldValue)
    elif kind in TICKED and raw.FPDFAnnot_IsChecked(form, annotation):
        is_radio = kind == raw.FPDF_FORMFIELD_RADIOBUTTON
        value = (field(raw.FPDFAnnot_GetFormFieldExportValue) if is_radio else "") or "yes"
    name = field(raw.FPDFAnnot_GetFormFieldAlternateName) or field(raw.FPDFAnnot_GetFormFieldName) or "field"
    return [f"{name}: {value}"] if value else []


def _string(call: Callable[..., int], *about: Any) -> str:
    """Read a string of pdfium, which first returns the length in bytes."""
    size = call(*about, None, 0)
    if not 2 < size <= LONGEST:
        return ""
    buffer = ctypes.create_string_buffer(size)
    call(*about, ctypes.cast(buffer, ctypes.POINTER(ctypes.c_ushort)), size)
    text = buffer.raw[: size - 2].decode("utf-16-le", "replace").replace("\r\n", "\n").replace("\r", "\n")
    return clean(text).rstrip(SOFT)
