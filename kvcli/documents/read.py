"""Read a file as a document: text in this process, other kinds in a limited process; or refuse it with the reason."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG
from typing import IO

from kvcli.documents.decode import HEAD, check_type, decode, disagreement, sniff
from kvcli.documents.document import Document, Ocr, Parsed, ParseJob, Span, marked, no_text, parse_pages, split_pages
from kvcli.documents.parse_in_process import parse_outside
from kvcli.documents.plain import parse_plain, prompt_text
from kvcli.documents.recognized_pages import RecognizedPages
from kvcli.documents.scanned_pages import way_to_ocr, with_ocr
from kvcli.errors import BadInput, UsageError, reading
from kvcli.worker_process import Limits

MAX_BYTES = 64 * 2**20  # of a text; an HTML page or an archive has the same limit
MAX_PDF = 512 * 2**20  # pictures are not read, so a PDF may be large
BUNDLED = ("demo:report", "demo:pdf")  # the example documents, by name
CHUNK = 1 << 20
Progress = Callable[[int, int], None]


def read_document(
    path: str | Path,
    *,
    name: str | None = None,
    limit: int | None = None,
    pages: str | None = None,
    password: str | None = None,
    type: str | None = None,
    limits: Limits | None = None,
    ocr: Ocr = "auto",
    on_page: Progress | None = None,
    cache: Path | None = None,
) -> Document:
    """Read a PDF, HTML, EPUB, DOCX, mail, notebook or text file, or a bundled example: `demo:report`, `demo:pdf`.

    `paper.pdf:3-9` reads those pages, as `pages` does, unless a file of that full name exists. The kind of a file is
    detected from its content first; `type` overrides it. Messages use `name`, as the user typed it; the document is
    named by its file name. `limit` is the most bytes to read, and `limits` bound the parser process. `ocr`: recognize
    text of scanned pages, of all pages ("on") or of none ("off"); `on_page` then gets "page i of n" as two numbers, and
    what is recognized is saved in the folder `cache` for later calls.
    """
    shown = name or str(path)
    file, spans = _place(path, pages, shown)
    if spans and not pages:
        shown = split_pages(shown)[0]
    kind = check_type(type)
    job = ParseJob(shown, kind or "", spans, password, typed=kind is not None, ocr=ocr, progress=on_page)
    called = file if file in BUNDLED else Path(file).name
    found = _bundled(file) if file in BUNDLED else Path(os.path.expanduser(file))
    with reading(shown):
        if found.is_dir():
            raise BadInput(
                f"{shown} is a folder, not a file",
                code="is_a_folder",
                try_=[f"a file in it: {shown}/FILE", f"chat -f {shown} attaches the files in it"],
            )
        try:
            stream = found.open("rb")
        except FileNotFoundError:
            if "://" in shown:
                raise _address(shown) from None
            raise BadInput(f"no such file: {shown}", code="file_missing", try_=_similar(found)) from None
        with stream:
            return replace(_read(stream, job, limit, limits, cache), name=called)


def document_of(
    data: bytes,
    name: str,
    *,
    pages: str | None = None,
    password: str | None = None,
    type: str | None = None,
    limits: Limits | None = None,
    ocr: Ocr = "auto",
    on_page: Progress | None = None,
    cache: Path | None = None,
) -> Document:
    """Return a document from bytes already read, for example standard input."""
    kind, spans = check_type(type), parse_pages(pages) if pages else ()
    job = ParseJob(name, kind or sniff(data[:HEAD], name), spans, password, kind is not None, ocr, on_page)
    with reading(name), tempfile.SpooledTemporaryFile(MAX_BYTES) as copy:
        copy.write(data)
        return _document(copy, job, limits, cache)


def most_bytes(head: bytes, name: str, kind: str = "") -> int:
    """Return the size limit of a file from its kind, or else from its first bytes."""
    return MAX_PDF if (kind or sniff(head, name)) == "pdf" else MAX_BYTES


def _place(path: str | Path, pages: str | None, shown: str) -> tuple[str, tuple[Span, ...]]:
    """Return the file and its pages. A path that exists as a whole is not split."""
    whole = str(path)
    rest, suffix = split_pages(whole)
    if suffix is None or os.path.lexists(os.path.expanduser(whole)):
        return whole, parse_pages(pages) if pages else ()
    if pages:
        raise UsageError(f"pages are named twice: {shown} and {pages}", code="bad_pages", try_=["only one of them"])
    return rest, parse_pages(suffix)


def _read(
    stream: IO[bytes], job: ParseJob, limit: int | None, limits: Limits | None, cache: Path | None = None
) -> Document:
    head = stream.read(HEAD)
    job = replace(job, kind=job.kind or sniff(head, job.name))
    most = limit if limit is not None else most_bytes(head, job.name, job.kind)
    before = os.fstat(stream.fileno())
    if S_ISREG(before.st_mode) and before.st_size > most:
        raise too_large(job.name, before.st_size, most)
    with tempfile.SpooledTemporaryFile(MAX_BYTES) as copy:
        size, chunk = 0, head
        while chunk:
            copy.write(chunk)
            size += len(chunk)
            if size > most:  # a pipe or a device has no size beforehand
                raise too_large(job.name, size, most)
            # the file may grow while it is read; virtual files, as in /proc, have size 0
            if S_ISREG(before.st_mode) and before.st_size and size > before.st_size:
                raise changed(job.name)
            chunk = stream.read(CHUNK)
        after = os.fstat(stream.fileno())
        if S_ISREG(after.st_mode) and (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
            raise changed(job.name)
        return _document(copy, job, limits, cache)


def _document(
    copy: tempfile.SpooledTemporaryFile[bytes], job: ParseJob, limits: Limits | None, cache: Path | None
) -> Document:
    """Return the document in a copy of its file."""
    copy.seek(0)
    sha256 = hashlib.file_digest(copy, "sha256").hexdigest()
    copy.seek(0)
    is_text, saved = job.kind in ("text", "markdown"), RecognizedPages.of(cache, sha256, job)
    text, parsed = _text(copy.read(), job) if is_text else _outside(copy, job, limits, saved)
    note = None if job.typed else disagreement(job.name, parsed.kind)
    return Document(
        job.name, text, sha256, unit=parsed.unit, sections=tuple(parsed.sections), kind=parsed.kind,
        without_text=tuple(parsed.without_text), blank=parsed.blank, n_pages=parsed.n_pages, title=parsed.title,
        notes=(*([note] if note else []), *parsed.notes),
    )  # fmt: skip


def _text(data: bytes, job: ParseJob) -> tuple[str, Parsed]:
    text = decode(data, job.name)
    if not text.strip():
        raise BadInput(f"{job.name} is empty", code="empty_file", lines=[f"{len(data):,} bytes without text"])
    parsed = parse_plain(text, job)
    if not parsed.sections:
        raise no_text(job.name, "the requested pages have none")
    return prompt_text(text, parsed, job), parsed


def _outside(file: IO[bytes], job: ParseJob, limits: Limits | None, saved: RecognizedPages) -> tuple[str, Parsed]:
    parsed = parse_outside(file, replace(job, ocr="off"), limits)
    parsed = with_ocr(job, parsed, limits, saved, lambda job, limits: parse_outside(file, job, limits))
    if not parsed.sections and parsed.without_text:
        n = len(parsed.without_text)
        raise no_text(job.name, f"its {n:,} page{'s' * (n > 1)} seem to be scanned", way_to_ocr(job))
    if not parsed.sections:
        raise no_text(job.name, "; ".join(parsed.notes) or "its parser found none")
    if parsed.unit == "page":
        return marked("page", parsed.sections), parsed
    return "\n\n".join(s.text.strip("\n") for s in parsed.sections) + "\n", parsed


def _bundled(name: str) -> Path:
    from kvcli.demo import report_path, sample_path

    return sample_path() if name == "demo:pdf" else report_path()


def too_large(name: str, size: int, limit: int) -> BadInput:
    return BadInput(
        f"{name} is too large",
        code="file_too_large",
        lines=[f"{size / 2**20:,.1f} MiB or more; the limit is {limit / 2**20:,.0f} MiB"],
        detail={"bytes": size, "limit": limit},
        try_=["attach only the relevant part"],
    )


def _address(shown: str) -> BadInput:
    why = "only http:// and https:// addresses are fetched (from Python by kvcli.documents.fetch.read_address)"
    return BadInput(f"{shown} is an address, not a file", code="not_a_file", lines=[why], try_=["save it as a file"])


def changed(name: str) -> BadInput:
    return BadInput(
        f"{name} changed while it was read",
        code="file_changed",
        lines=["another program is still writing to it"],
        try_=["wait until it is complete, or read a copy of it"],
    )


def _similar(file: Path) -> list[str]:
    from difflib import get_close_matches

    try:
        names = [*BUNDLED, *(entry.name for entry in file.parent.iterdir())]
    except OSError:
        names = list(BUNDLED)
    return [f"did you mean {match}?" for match in get_close_matches(file.name, names, 1)]
