"""A page of HTML: sections under its headings, or blocks of lines where it has none."""

from __future__ import annotations

from typing import IO

from kvcli.documents.markup import read_markup
from kvcli.documents.parsed import Job, Parsed, no_text, refuse_pages, refuse_too_much
from kvcli.documents.plain import sections_of


def read(file: IO[bytes], job: Job) -> Parsed:
    """The text of the page as a browser without style sheets would show it."""
    refuse_pages(job.name, job.spans, "it is HTML")
    notes: list[str] = []
    title, headed = read_markup(file.read(), job.name, "HTML", notes)
    if not headed:
        raise no_text(job.name, "there are only tags, scripts or hidden parts in it")
    refuse_too_much(job.name, sum(len(body) for _, body in headed), len(headed), paged=False)
    unit, sections = sections_of(headed)
    return Parsed("html", unit, sections, title=title, notes=notes)
