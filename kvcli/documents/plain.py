"""Text and markdown reader: pages if the text marks them, else sections under headings, else blocks of lines."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from kvcli.documents.dehyphenate import unmarked
from kvcli.documents.document import (
    MAX_SECTIONS,
    Parsed,
    ParseJob,
    Section,
    Unit,
    marked,
    no_text,
    present,
    refuse_pages,
    refuse_too_much,
)
from kvcli.documents.markdown import headed_markdown

PAGE = re.compile(r"^\[p\. (\d{1,9})\][ \t]*$", re.M)
BLOCK = 40  # most lines of a block
SOON = 24  # lines after which the end of a paragraph ends the block
LABEL = 80  # characters of a label
OPENING = "Opening"  # label of the text before the first heading


def parse_plain(text: str, job: ParseJob) -> Parsed:
    """Split a text into sections. Unless it has pages, the sections together are the whole text, unchanged."""
    pages = _paged(text, job.name)
    if pages is not None:
        return _pages(pages, job)
    refuse_pages(job.name, job.spans, "it is text without page marks")
    is_headed = job.kind == "markdown"
    headed = list(itertools.islice(headed_markdown(text), MAX_SECTIONS + 2)) if is_headed else [("", text)]
    title = clean_label(headed[0][0] or headed[1][0]) if len(headed) > 1 else None
    return headed_text(job, headed, "it has only empty lines", title=title)


def headed_text(
    job: ParseJob,
    headed: Iterable[tuple[str, str]],
    nothing: str,
    *,
    unit: Unit = "heading",
    title: str | None = None,
    notes: Iterable[str] = (),
) -> Parsed:
    """Return a text in sections under its headings (empty heading: the opening), or in blocks of lines.

    Refuse too much text while it is read, and a file without text with the reason `nothing`.
    """
    found: list[tuple[str, str]] = []
    size = 0
    for heading, body in headed:
        found.append((heading, body))
        size += len(body)
        refuse_too_much(job.name, size, len(found), paged=False)
    if not any(body.strip() for _, body in found):
        raise no_text(job.name, nothing)
    if unit == "heading" and len(found) == 1:
        unit, found = "line", list(_blocks(found[0][1]))
        refuse_too_much(job.name, size, len(found), paged=False)
    return Parsed(job.kind, unit, number(found), title=title, notes=list(dict.fromkeys(notes)))


def number(headed: Sequence[tuple[str, str]]) -> list[Section]:
    """Return sections under headings; a repeated label gets a number, so that a citation names one place."""
    times: dict[str, int] = {}
    used: set[str] = set()
    sections: list[Section] = []
    for heading, body in headed:
        label = base = clean_label(heading)
        while label in used:  # a heading in the file may itself be `Methods (2)`
            times[base] = times.get(base, 1) + 1
            label = f"{base} ({times[base]})"
        used.add(label)
        if body.strip():
            sections.append(Section(len(sections) + 1, label, body))
    return sections


def clean_label(heading: str) -> str:
    """Return a heading that fits a citation: one line, no brackets, limited length."""
    words = "".join(c for c in heading.translate(str.maketrans("[]", "()")) if c.isprintable() or c.isspace())
    label = " ".join(words.split())
    return (label if len(label) <= LABEL else label[: LABEL - 1].rsplit(" ", 1)[0] + "…") or OPENING


def _marks(text: str) -> list[re.Match[str]]:
    """Return page marks with increasing numbers, at most one above the limit; [] if they are no page marks."""
    marks = list(itertools.islice(PAGE.finditer(text), MAX_SECTIONS + 1))
    return marks if len(marks) > 1 and all(int(a[1]) < int(b[1]) for a, b in itertools.pairwise(marks)) else []


def _paged(text: str, name: str) -> list[tuple[int, str]] | None:
    """Return pages with their numbers: after marks with increasing numbers, or between form feeds."""
    if marks := _marks(text):
        refuse_too_much(name, 0, len(marks))
        ends = [m.start() for m in marks[1:]] + [len(text)]
        bodies = [text[m.end() : end] for m, end in zip(marks, ends, strict=True)]
        bodies[0] = text[: marks[0].start()] + bodies[0].lstrip("\n")  # a title above the first mark
        return [(int(m[1]), body) for m, body in zip(marks, bodies, strict=True)]
    if text.count("\f") > 1 or "\f" in text.strip("\f\n"):  # a form feed at either end separates nothing
        refuse_too_much(name, 0, text.count("\f"))
        bodies = text.removesuffix("\n").removesuffix("\f").split("\f")
        return [(n, unmarked(body)) for n, body in enumerate(bodies, 1)]
    return None


def _pages(pages: Sequence[tuple[int, str]], job: ParseJob) -> Parsed:
    numbers = [n for n, _ in pages]
    wanted = present(job.spans, numbers, job.name) if job.spans else set(numbers)
    sections = [Section(n, str(n), body.strip("\n")) for n, body in pages if n in wanted and body.strip()]
    empty = sorted(wanted - {s.number for s in sections})
    return Parsed(job.kind, "page", sections, n_pages=len(pages), without_text=empty)


def prompt_text(text: str, parsed: Parsed, job: ParseJob) -> str:
    """Return the prompt text: the file unchanged, with marks only for form feeds or chosen pages."""
    if parsed.unit == "page" and (job.spans or not _marks(text)):
        return marked("page", parsed.sections)
    return text


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield blocks of lines, each ending with a paragraph if one ends soon enough."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    start = 0
    while start < len(lines):
        window = range(start + SOON, min(start + BLOCK, len(lines)))
        end = next((i + 1 for i in window if not lines[i].strip()), min(start + BLOCK, len(lines)))
        body = "\n".join(lines[start:end]) + ("\n" if end < len(lines) or text.endswith("\n") else "")
        if body.strip():
            yield (f"{start + 1}-{end}" if end > start + 1 else str(end)), body
        start = end
