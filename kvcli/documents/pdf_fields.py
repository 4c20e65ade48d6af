"""What lies over a PDF page: fields of its form that were filled in, a line each, and what was typed onto it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pypdfium2.raw as raw

from kvcli.documents.repair import SOFT, clean

MOST = 2000  # fields of one page; a form for people has fewer
LONGEST = 1 << 16  # bytes of one value
TICKED = (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON)
VALUED = (raw.FPDF_FORMFIELD_TEXTFIELD, raw.FPDF_FORMFIELD_COMBOBOX, raw.FPDF_FORMFIELD_LISTBOX)
Typed = tuple[str, tuple[float, float, float, float]]  # and its place: left, bottom, right, top
UNSEEN = raw.FPDF_ANNOT_FLAG_HIDDEN | raw.FPDF_ANNOT_FLAG_NOVIEW
UNREAD = (raw.FPDF_ANNOT_STAMP, raw.FPDF_ANNOT_FILEATTACHMENT)


def field_lines(document: Any, page: Any) -> tuple[list[str], list[Typed], bool]:
    """`name: value` of every field that has one; what was typed onto the page; whether more is on it."""
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
    """The text that an annotation shows on the page."""
    place = raw.FS_RECTF()
    text = _string(lambda *args: raw.FPDFAnnot_GetStringValue(annotation, b"Contents", *args))
    if not text.strip() or not raw.FPDFAnnot_GetRect(annotation, place):
        return []
    return [(text, (place.left, place.bottom, place.right, place.top))]


def _line(form: Any, annotation: Any) -> list[str]:
    kind = raw.FPDFAnnot_GetFormFieldType(form, annotation)
    name = _field(raw.FPDFAnnot_GetFormFieldAlternateName, form, annotation)
    name = name or _field(raw.FPDFAnnot_GetFormFieldName, form, annotation)
    value = ""
    if kind in VALUED:
        value = _field(raw.FPDFAnnot_GetFormFieldValue, form, annotation)
    elif kind in TICKED and raw.FPDFAnnot_IsChecked(form, annotation):
        value = (
            "yes"
            if kind == raw.FPDF_FORMFIELD_CHECKBOX
            else _field(raw.FPDFAnnot_GetFormFieldExportValue, form, annotation) or "yes"
        )
    return [f"{name or 'field'}: {value}"] if value else []


def _field(call: Any, form: Any, annotation: Any) -> str:
    return " ".join(_string(lambda *args: call(form, annotation, *args)).split())


def _string(call: Callable[..., int]) -> str:
    """A string of pdfium, which tells its length in bytes first."""
    size = call(None, 0)
    if not 2 < size <= LONGEST:
        return ""
    buffer = ctypes.create_string_buffer(size)
    call(ctypes.cast(buffer, ctypes.POINTER(ctypes.c_ushort)), size)
    text = buffer.raw[: size - 2].decode("utf-16-le", "replace").replace("\r\n", "\n").replace("\r", "\n")
    return clean(text).rstrip(SOFT)
