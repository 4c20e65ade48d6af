"""Parse jobs (input of a document reader) and parsed files (its result)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcli.documents.document import Section, Unit
from kvcli.documents.pages import Span
from kvcli.errors import BadInput

MAX_SECTIONS = 100_000
MAX_CHARACTERS = 64 * 2**20  # of all sections together


@dataclass(frozen=True, slots=True)
class ParseJob:
    """One file to read: its name in messages, its kind, and the pages to read."""

    name: str
    kind: str
    spans: tuple[Span, ...] = ()  # none: all pages
    password: str | None = None
    typed: bool = False  # True if the user named the kind


@dataclass(slots=True)
class Parsed:
    """A file in sections."""

    kind: str
    unit: Unit
    sections: list[Section]
    title: str | None = None
    n_pages: int | None = None
    without_text: list[int] = field(default_factory=list)
    blank: int = 0
    notes: list[str] = field(default_factory=list)


def refuse_too_much(name: str, characters: int, sections: int, *, paged: bool = True) -> None:
    """Refuse text above the limits, for any format. `paged`: the user can ask for some of its pages."""
    for n, most, what in ((characters, MAX_CHARACTERS, "characters of text"), (sections, MAX_SECTIONS, "sections")):
        if n > most:
            raise BadInput(
                f"{name} has too much text",
                code="document_too_large",
                lines=[f"{n:,} {what} or more; the limit is {most:,}"],
                detail={"limit": most},
                try_=[part_of(paged)],
            )


def part_of(paged: bool) -> str:
    """Return a hint on how to read less of a file."""
    return "--pages for a part of it" if paged else "attach only the relevant part, as a separate file"


def refuse_pages(name: str, spans: Sequence[Span], what: str) -> None:
    """Refuse page ranges for a format without pages."""
    if spans:
        raise BadInput(
            f"{name} has no pages to choose from",
            code="no_pages",
            lines=[f"{what}; only PDF files and texts with form feeds have pages"],
            try_=["leave the pages out"],
        )


def damaged(name: str, what: str, why: str) -> BadInput:
    """Return the error for a file that the parser of its format cannot read."""
    return BadInput(f"{name} cannot be read as {what}", code="damaged_file", lines=[why], try_=["get the file again"])


def no_text(name: str, why: str, try_: str = "") -> BadInput:
    return BadInput(f"{name} has no text", code="no_text", lines=[why], try_=[try_] if try_ else [])
