"""PDF by pdfium: every page as pieces of text, then order, running lines and words put right over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, Any

from kvcli.documents.document import Section
from kvcli.documents.edges import without_running
from kvcli.documents.lines import Piece, paragraphs, reading_order
from kvcli.documents.pages import chosen, listed
from kvcli.documents.parsed import Job, Parsed, damaged, no_text, refuse_too_much
from kvcli.documents.pdf_open import open_pdf
from kvcli.documents.pdf_page import Page, read_page
from kvcli.documents.repair import Words, clean, mended, unmarked
from kvcli.errors import BadInput

NEAR = 8  # pages around the chosen ones that are looked at too, to know what runs along the edges


def read(file: IO[bytes], job: Job) -> Parsed:
    """The chosen pages as sections; those without text are listed."""
    document = open_pdf(file, job)
    n_pages = len(document)
    if not n_pages:
        raise damaged(job.name, "a PDF", "it has no pages")
    refuse_too_much(job.name, 0, 0 if job.spans else n_pages)
    wanted = chosen(job.spans, n_pages, job.name) if job.spans else list(range(1, n_pages + 1))
    pages = list(_pages(document, _around(wanted, n_pages), job.name))
    asked = set(wanted)
    sections = [section for section in _sections(pages) if section.number in asked]
    if not sections:
        raise _nothing(job, [page for page in pages if page.number in asked])
    parsed = Parsed("pdf", "page", sections, title=_title(document), n_pages=n_pages)
    empty = [page for page in pages if page.number in asked - {section.number for section in sections}]
    parsed.without_text = [page.number for page in empty if page.is_picture or page.is_broken]
    parsed.blank = len(empty) - len(parsed.without_text)
    if bad := [page.number for page in pages if page.is_garbled and page.number in asked]:
        parsed.notes.append(f"a font on page {listed(bad)} does not say which letters it draws: parts are unreadable")
    if bad := [page.number for page in pages if page.is_broken and page.number in asked]:
        parsed.notes.append(f"page {listed(bad)} is damaged and could not be read")
    return parsed


def _around(wanted: Sequence[int], n_pages: int) -> list[int]:
    """The pages asked for, and some before the first and after the last of them."""
    near = {n for end in (wanted[0], wanted[-1]) for n in range(end - NEAR, end + NEAR + 1) if 0 < n <= n_pages}
    return sorted(near | set(wanted))


def _pages(document: Any, numbers: Sequence[int], name: str) -> Iterator[Page]:
    size = 0
    for number in numbers:
        page = read_page(document, number)
        size += sum(len(piece.text) for piece in page.pieces)
        refuse_too_much(name, size, 0)
        yield page


def _sections(pages: Sequence[Page]) -> Iterator[Section]:
    """The text of every page that has some."""
    words = Words()
    for page in pages:
        words.add(piece.text for piece in page.pieces)
    for page, pieces in zip(pages, without_running([(page.number, page.pieces) for page in pages]), strict=True):
        if text := _text(pieces, page.fields, words):
            yield Section(page.number, str(page.number), text)


def _text(pieces: Sequence[Piece], fields: Sequence[str], words: Words) -> str:
    text = mended(paragraphs(reading_order(pieces)), words) if pieces else ""
    return "\n\n".join((text, unmarked("\n".join(fields)))).strip()


def _nothing(job: Job, pages: Sequence[Page]) -> BadInput:
    if all(page.is_broken for page in pages):
        return damaged(job.name, "a PDF", "none of its pages can be read")
    if not any(page.is_picture for page in pages):
        return no_text(job.name, f"none of {len(pages):,} pages has text, nor a picture of one")
    error = no_text(job.name, f"none of {len(pages):,} pages has a text layer: they look scanned")
    error.try_ = ("a copy that went through text recognition (OCR), as ocrmypdf makes",)
    return error


def _title(document: Any) -> str | None:
    title = " ".join(clean(document.get_metadata_value("Title") or "").split())
    return title if title and title.casefold() not in ("untitled", "(anonymous)") else None
