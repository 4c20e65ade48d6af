"""Text and markdown: pages where the text marks them, headings where it has several, else blocks of lines."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from kvcli.documents.dehyphenate import unmarked
from kvcli.documents.document import Section, Unit, marked
from kvcli.documents.markdown import headed_markdown
from kvcli.documents.pages import present
from kvcli.documents.parsed import MAX_SECTIONS, Parsed, ParseJob, no_text, refuse_pages, refuse_too_much

PAGE = re.compile(r"^\[p\. (\d{1,9})\][ \t]*$", re.M)
BLOCK = 40  # lines of a block at most
SOON = 24  # lines after which the end of a paragraph ends the block
LABEL = 80  # characters of a label
OPENING = "Opening"  # the label of what stands before the first heading


def parse_plain(text: str, job: ParseJob) -> Parsed:
    """Sections of a text. Together they are the whole text, letter for letter, unless it has pages."""
    pages = _paged(text, job.name)
    if pages is not None:
        return _pages(pages, job)
    refuse_pages(job.name, job.spans, "it is text without page marks")
    is_headed = job.kind == "markdown"
    headed = list(itertools.islice(headed_markdown(text), MAX_SECTIONS + 2)) if is_headed else [("", text)]
    title = clean_label(headed[0][0] or headed[1][0]) if len(headed) > 1 else None
    return headed_text(job, headed, "there are only empty lines in it", title=title)


def headed_text(
    job: ParseJob,
    headed: Iterable[tuple[str, str]],
    nothing: str,
    *,
    unit: Unit = "heading",
    title: str | None = None,
    notes: Iterable[str] = (),
) -> Parsed:
    """A text in sections under its headings, an empty one being that of the opening, or in blocks of lines.

    Refuses too much text as it comes, and a file without any with the reason `nothing`.
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
    """Sections under headings; a label that comes again says which time, so that a citation means one place."""
    times: dict[str, int] = {}
    used: set[str] = set()
    sections: list[Section] = []
    for heading, body in headed:
        label = base = clean_label(heading)
        while label in used:  # a heading may itself be written `Methods (2)`
            times[base] = times.get(base, 1) + 1
            label = f"{base} ({times[base]})"
        used.add(label)
        if body.strip():
            sections.append(Section(len(sections) + 1, label, body))
    return sections


def clean_label(heading: str) -> str:
    """A heading as a citation can hold it: one line, no brackets, not too long."""
    words = "".join(c for c in heading.translate(str.maketrans("[]", "()")) if c.isprintable() or c.isspace())
    label = " ".join(words.split())
    return (label if len(label) <= LABEL else label[: LABEL - 1].rsplit(" ", 1)[0] + "…") or OPENING


def _marks(text: str) -> list[re.Match[str]]:
    """Marks of pages that count upwards, one more than are read at most; none where they are no such marks."""
    marks = list(itertools.islice(PAGE.finditer(text), MAX_SECTIONS + 1))
    return marks if len(marks) > 1 and all(int(a[1]) < int(b[1]) for a, b in itertools.pairwise(marks)) else []


def _paged(text: str, name: str) -> list[tuple[int, str]] | None:
    """Pages with their numbers: after marks that count upwards, or between form feeds."""
    if marks := _marks(text):
        refuse_too_much(name, 0, len(marks))
        ends = [m.start() for m in marks[1:]] + [len(text)]
        bodies = [text[m.end() : end] for m, end in zip(marks, ends, strict=True)]
        bodies[0] = text[: marks[0].start()] + bodies[0].lstrip("\n")  # a title above the first mark
        return [(int(m[1]), body) for m, body in zip(marks, bodies, strict=True)]
    if text.count("\f") > 1 or "\f" in text.strip("\f\n"):  # one at an end parts nothing
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
    """What a model reads: the file as it is, with marks only where form feeds or chosen pages ask for them."""
    if parsed.unit == "page" and (job.spans or not _marks(text)):
        return marked("page", parsed.sections)
    return text


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Lines in blocks that end with a paragraph where one ends soon enough."""
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
