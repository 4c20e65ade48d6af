"""What was filled into the form of a PDF page: text fields, choices and ticked boxes, a line each."""

from __future__ import annotations

import ctypes
from typing import Any

import pypdfium2.raw as raw

from kvcli.documents.repair import SOFT, clean

MOST = 2000  # fields of one page; a form for people has fewer
LONGEST = 1 << 16  # bytes of one value
TICKED = (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON)
VALUED = (raw.FPDF_FORMFIELD_TEXTFIELD, raw.FPDF_FORMFIELD_COMBOBOX, raw.FPDF_FORMFIELD_LISTBOX)


def field_lines(document: Any, page: Any) -> list[str]:
    """`name: value` of every field that has one, in the order of the file."""
    form = document.formenv
    if form is None:
        return []
    lines = []
    for i in range(min(MOST, raw.FPDFPage_GetAnnotCount(page))):
        annotation = raw.FPDFPage_GetAnnot(page, i)
        if not annotation:
            continue
        try:
            if raw.FPDFAnnot_GetSubtype(annotation) == raw.FPDF_ANNOT_WIDGET:
                lines += _line(form, annotation)
        finally:
            raw.FPDFPage_CloseAnnot(annotation)
    return lines


def _line(form: Any, annotation: Any) -> list[str]:
    kind = raw.FPDFAnnot_GetFormFieldType(form, annotation)
    name = _string(raw.FPDFAnnot_GetFormFieldAlternateName, form, annotation)
    name = name or _string(raw.FPDFAnnot_GetFormFieldName, form, annotation)
    value = ""
    if kind in VALUED:
        value = _string(raw.FPDFAnnot_GetFormFieldValue, form, annotation)
    elif kind in TICKED and raw.FPDFAnnot_IsChecked(form, annotation):
        value = (
            "yes"
            if kind == raw.FPDF_FORMFIELD_CHECKBOX
            else _string(raw.FPDFAnnot_GetFormFieldExportValue, form, annotation) or "yes"
        )
    return [f"{name or 'field'}: {value}"] if value else []


def _string(call: Any, form: Any, annotation: Any) -> str:
    """A string of pdfium, which tells its length in bytes first."""
    size = call(form, annotation, None, 0)
    if not 2 < size <= LONGEST:
        return ""
    buffer = ctypes.create_string_buffer(size)
    call(form, annotation, ctypes.cast(buffer, ctypes.POINTER(ctypes.c_ushort)), size)
    return " ".join(clean(buffer.raw[: size - 2].decode("utf-16-le", "replace")).rstrip(SOFT).split())
