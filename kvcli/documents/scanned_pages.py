"""Scanned and unreadable pages of a PDF: read once more with text recognition (OCR), or named with what to type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

from kvcli.documents.document import Parsed, ParseJob, listed
from kvcli.documents.recognized_pages import RecognizedPages
from kvcli.errors import BadInput
from kvcli.installing import EXTRAS, pip
from kvcli.worker_process import Limits

MOST = 200  # pages of a document that are recognized
MEMORY = 4 << 30  # bytes of address space; most of it is reserved for threads and not used
SECONDS = 60  # of processor time for a page, at most


def with_ocr(
    job: ParseJob,
    parsed: Parsed,
    limits: Limits | None,
    saved: RecognizedPages,
    parse: Callable[[ParseJob, Limits], Parsed],
) -> Parsed:
    """Return a PDF with the text of its scanned pages recognized, if that is wanted and installed; else with a hint.

    `saved`: pages that were recognized before. `parse` parses the file in a separate process. Raises BadInput.
    """
    pages, n = sorted({*parsed.without_text, *parsed.unreadable}), len(parsed.sections) + len(parsed.without_text)
    if parsed.kind != "pdf" or not (pages or job.ocr == "on"):
        return parsed
    known = saved.read()
    n = n + parsed.blank if job.ocr == "on" else len({*pages} - known.keys())
    found = Parsed("pdf", "page", [], without_text=parsed.without_text, unreadable=parsed.unreadable)
    if job.ocr == "off" or (job.ocr == "auto" and not has_ocr()):
        found.notes.append(f"text recognition (OCR) reads such pages: {way_to_ocr(job)}")
    elif n > MOST:
        what = f"{job.name} has {n:,} pages to recognize (OCR), and at most {MOST} are recognized at once"
        raise BadInput(what, code="document_too_heavy", try_=[f"a part of it: {job.name}:1-{MOST}", "--ocr off"])
    else:
        chosen = job if job.ocr == "on" else replace(job, spans=tuple((page, page) for page in pages))
        chosen = replace(chosen, known=known)
        try:
            found = parse(chosen, limits or Limits(MEMORY, SECONDS * (n + 1), 5.0 * SECONDS * (n + 1)))
        except BadInput as error:
            error.try_ = (*error.try_, "--ocr off, without the text of scanned pages")
            raise
        saved.add(found.lines)
    if found.unreadable:
        which = f"a font on page {listed(found.unreadable)} does not name its letters"
        found.notes.insert(0, f"{which}, so parts are unreadable")
    sections = {section.number: section for section in (*parsed.sections, *found.sections)}
    return replace(
        parsed,
        sections=[sections[number] for number in sorted(sections)],
        without_text=found.without_text,
        blank=parsed.blank + found.blank,
        notes=[*dict.fromkeys([*parsed.notes, *found.notes])],
    )


def has_ocr() -> bool:
    return all(find_spec(package) for package in EXTRAS["ocr"])


def way_to_ocr(job: ParseJob) -> str:
    """Return what to type, so that scanned pages are recognized; "" if they are."""
    return pip(*EXTRAS["ocr"]) if not has_ocr() else "--ocr auto" if job.ocr == "off" else ""
