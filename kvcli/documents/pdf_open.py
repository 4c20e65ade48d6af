"""Open a PDF, or refuse it with the reason: encrypted, cut off, or no PDF at all."""

from __future__ import annotations

from typing import IO, Any

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from kvcli.documents.parsed import ParseJob, damaged, no_text
from kvcli.errors import BadInput

TAIL = 4096  # bytes at the end in which a complete file has its end mark
PRINT = "print the form to a PDF, for example with Adobe Reader"
BEHIND = 1 << 16  # bytes of padding and comments that may follow


def open_pdf(file: IO[bytes], job: ParseJob) -> Any:
    """Return a `pypdfium2.PdfDocument` with its form initialized, if it has one."""
    size = file.seek(0, 2)
    if not size:
        raise BadInput(f"{job.name} is empty", code="empty_file", lines=["0 bytes"])
    file.seek(max(0, size - TAIL - BEHIND))
    tail = file.read()
    file.seek(0)
    if b"%PDF-" not in file.read(1024 + 5):
        raise damaged(job.name, "a PDF", "it has no PDF header")
    if not _is_whole(tail):
        # the rest could often be read, but the user would not know which pages are missing
        raise damaged(job.name, "a PDF", "its end is missing")
    file.seek(0)
    try:
        document = pdfium.PdfDocument(file, password=job.password)
        if document.get_formtype() == raw.FORMTYPE_XFA_FULL:
            why = "it is a dynamic XFA form; its page is a placeholder for pages made by another program"
            raise no_text(job.name, why, PRINT)
        document.init_forms()
        return document
    except pdfium.PdfiumError:
        raise _why(job, raw.FPDF_GetLastError()) from None


def _is_whole(tail: bytes) -> bool:
    """True if the file has an end mark, followed only by zeros, empty lines and comments, or by few bytes.

    A file that was saved twice also has an end mark in its middle, and may have been cut off after it.
    """
    if b"%%EOF" in tail[-TAIL:] or b"startxref" in tail[-TAIL:]:
        return True
    _, end, behind = tail.rpartition(b"%%EOF")
    lines = behind.replace(b"\0", b"\n").splitlines()
    return bool(end) and all(not line.strip() or line.startswith(b"%") for line in lines)


def _why(job: ParseJob, error: int) -> BadInput:
    if error == raw.FPDF_ERR_PASSWORD and job.password is None:
        return BadInput(
            f"{job.name} is encrypted",
            code="encrypted",
            lines=["it needs a password"],
            try_=["kvcli summarize --password-file FILE", "save a copy without a password"],
        )
    if error == raw.FPDF_ERR_PASSWORD:
        return BadInput(
            f"{job.name} does not open with this password", code="wrong_password", try_=["another --password-file"]
        )
    if error == raw.FPDF_ERR_SECURITY:
        return BadInput(
            f"{job.name} uses an unsupported encryption",
            code="encrypted",
            lines=["it cannot be opened with or without a password"],
            try_=["save a copy without protection in the program that opens it"],
        )
    return damaged(job.name, "a PDF", "its cross-reference table (xref) or its pages are damaged")
