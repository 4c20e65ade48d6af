"""PDF reader by pdfium: text pieces of each page, then reading order, running headers, and broken words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO, Any

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from kvcli.documents.dehyphenate import Words, clean, mended, unmarked
from kvcli.documents.document import Parsed, ParseJob, Section, damaged, listed, no_text, present, refuse_too_much
from kvcli.documents.pdf_page import Page, read_page
from kvcli.documents.pdf_seen import VisiblePages
from kvcli.documents.reading_order import LinePiece, paragraphs, reading_order
from kvcli.documents.running_headers import without_running
from kvcli.errors import BadInput

# Open a PDF, or refuse it with the reason: encrypted, cut off, or no PDF at all.

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


SHOWN = 8  # names of attached files in a note
NOTES = {  # attribute of a page -> note
    "is_broken": "page {} is damaged and could not be read",
    "is_hidden": "page {}: invisible text was skipped (invisible, in the page colour, or covered)",
    "is_cut": "page {}: text outside the page was skipped",
    "has_more": "page {}: a stamp or an attached file was not read",
}
NEAR = 8  # pages around the chosen ones that are parsed too, to detect running headers and footers


def read(file: IO[bytes], job: ParseJob) -> Parsed:
    """Return the chosen pages as sections; pages without text are listed."""
    document = open_pdf(file, job)
    n_pages = len(document)
    if not n_pages:
        raise damaged(job.name, "a PDF", "it has no pages")
    refuse_too_much(job.name, 0, 0 if job.spans else n_pages)
    numbers = range(1, n_pages + 1)
    wanted = present(job.spans or ((1, None),), numbers, job.name)
    seen = VisiblePages(file)
    around = {n for end in (min(wanted), max(wanted)) for n in range(end - NEAR, end + NEAR + 1) if n in numbers}
    pages = list(_pages(document, sorted(around | wanted), job.name, seen))
    asked = [page for page in pages if page.number in wanted]
    recognized = _recognize(document, asked, job)
    lines = {number: page_lines for number, page_lines in recognized.items() if number not in job.known}
    sections = [
        replace(section, is_ocr=section.number in recognized)
        for section in _sections(pages)
        if section.number in wanted
    ]
    parsed = Parsed("pdf", "page", sections, title=_title(document), n_pages=n_pages, lines=lines)
    with_text = {section.number for section in sections}
    empty = [page for page in asked if page.number not in with_text]
    parsed.without_text = [page.number for page in empty if page.is_picture or page.is_broken]
    if not sections and not recognized and not any(page.is_picture for page in empty):
        raise _nothing(job, asked)
    if tried := [n for n in recognized if n in with_text]:
        parsed.notes.append(f"text recognized by OCR, which may have errors: page {listed(tried)}")
    if tried := [n for n in recognized if n not in with_text]:
        parsed.notes.append(f"OCR found no text on page {listed(tried)}")
    parsed.unreadable = [page.number for page in asked if page.is_garbled]
    parsed.blank = len(empty) - len(parsed.without_text)
    parsed.notes += _notes(asked)
    if not seen.is_complete:
        parsed.notes.append("later pages were not checked for invisible text, because that took too long")
    if document.get_formtype() == raw.FORMTYPE_XFA_FOREGROUND and not any(page.fields for page in pages):
        parsed.notes.append("it is an XFA form, so its pages may be placeholders for pages made by another program")
    if n := raw.FPDFDoc_GetAttachmentCount(document):
        names = [clean(document.get_attachment(i).get_name()) for i in range(min(n, SHOWN))]
        more = f" and {n - SHOWN:,} more" if n > SHOWN else ""
        parsed.notes.append(f"files inside this PDF portfolio were not read: {', '.join(names)}{more}")
    return parsed


def _notes(pages: Sequence[Page]) -> Iterator[str]:
    """Yield notes on text that was left out of the pages or could not be read."""
    for so, what in NOTES.items():
        if bad := [page.number for page in pages if getattr(page, so)]:
            yield what.format(listed(bad))


def _pages(document: Any, numbers: Sequence[int], name: str, seen: VisiblePages) -> Iterator[Page]:
    size = 0
    for number in numbers:
        page = read_page(document, number, seen)
        size += sum(len(piece.text) for piece in page.pieces)
        refuse_too_much(name, size, 0)
        yield page


def _sections(pages: Sequence[Page]) -> Iterator[Section]:
    """Yield the text of each page that has text."""
    words, texts = Words(), []
    for pieces in without_running([(page.number, page.pieces) for page in pages]):
        texts.append(paragraphs(reading_order(pieces)) if pieces else [])
        words.add(line.text for paragraph in texts[-1] for line in paragraph)
    for page, text in zip(pages, texts, strict=True):
        parts = [mended(text, words), unmarked("\n".join(page.fields))]
        if whole := "\n\n".join(part for part in parts if part.strip()):
            yield Section(page.number, str(page.number), whole)


def _nothing(job: ParseJob, pages: Sequence[Page]) -> BadInput:
    if all(page.is_broken for page in pages):
        return damaged(job.name, "a PDF", "none of its pages can be read")
    if any(page.is_hidden or page.is_cut for page in pages):
        return no_text(job.name, f"all text of its {len(pages):,} pages is invisible or outside the page")
    return no_text(job.name, f"none of {len(pages):,} pages has text or a picture of text")


def _recognize(document: Any, pages: Sequence[Page], job: ParseJob) -> dict[int, list[LinePiece]]:
    """Replace the text of pages by what OCR reads, or read before, as `job.ocr` says; return it by page."""
    chosen = [p for p in pages if job.ocr == "on" or (job.ocr == "auto" and (p.is_picture or p.is_garbled))]
    new = [page.number for page in chosen if page.number not in job.known]
    for page in chosen:
        if page.number in job.known:
            lines = list(job.known[page.number])
        else:
            from kvcli.documents.ocr import recognize  # the worker imported it before it entered the sandbox

            if job.progress is not None:
                job.progress(new.index(page.number) + 1, len(new))
            lines = recognize(document, page.number)
        page.pieces, page.is_garbled, page.is_picture = lines, False, False
    return {page.number: page.pieces for page in chosen}


def _title(document: Any) -> str | None:
    title = " ".join(clean(document.get_metadata_value("Title") or "").split())
    return title if title and title.casefold() not in ("untitled", "(anonymous)") else None
