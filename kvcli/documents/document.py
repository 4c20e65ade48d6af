"""Documents: the text of a file with a name, in sections that a citation can name."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvcli.documents.reading_order import LinePiece
from kvcli.errors import BadInput, UsageError
from kvcli.models.refusals import blame_files
from kvcli.models.text import tokenizer_failed

# Parse page ranges as typed: `1-20,35`, and `paper.pdf:3-9` for a file with its pages.

Span = tuple[int, int | None]  # first and last page, both included; None: to the end
RANGES = re.compile(r"\d{1,9}(-\d{0,9})?(,\d{1,9}(-\d{0,9})?)*")
SUFFIX = re.compile(rf"(.+):({RANGES.pattern})", re.DOTALL)
SHOWN = 12  # page numbers listed one by one in a message


def parse_pages(text: str) -> tuple[Span, ...]:
    """Parse `1-20,35` to spans; `7-` means from page 7 on. Refuse other text and a range that runs backwards."""
    compact = "".join(text.split())
    if not RANGES.fullmatch(compact):
        raise UsageError(f"{text!r} is not a range of pages", code="bad_pages", try_=["--pages 1-20,35"])
    spans: list[Span] = []
    for part in compact.split(","):
        first, dash, last = part.partition("-")
        span = int(first), (int(last) if last else None if dash else int(first))
        if span[0] < 1 or (span[1] is not None and span[1] < span[0]):
            why = "page numbers start at 1" if span[0] < 1 else "its end is before its beginning"
            raise UsageError(f"{part} is not a range of pages: {why}", code="bad_pages", try_=["--pages 1-20,35"])
        spans.append(span)
    return tuple(spans)


def split_pages(path: str) -> tuple[str, str | None]:
    """Split `paper.pdf:3-9` into the path and its pages; return the path alone if no page range follows it."""
    found = SUFFIX.fullmatch(path)
    return (found[1], found[2]) if found else (path, None)


def is_address(name: str) -> bool:
    """True for the name of a web page, `http://...` or `https://...`, instead of a file."""
    return name[:8].casefold().startswith(("http://", "https://"))


def present(spans: Sequence[Span], numbers: Sequence[int], name: str) -> set[int]:
    """Return the pages of a file that the spans name. A range is never enumerated."""
    for first, last in spans:
        to = max(first, numbers[-1]) if last is None else last
        i = bisect_left(numbers, first)
        if to > numbers[-1] or i == len(numbers) or numbers[i] > to:
            beyond = to if first <= numbers[-1] < to else first  # the end that is beyond, or the start of a gap
            which = f": {listed(numbers)}" if numbers[-1] > len(numbers) else ""
            raise BadInput(
                f"{name} has no page {beyond}",
                code="no_such_page",
                lines=[f"it has {len(numbers):,} page{'s' * (len(numbers) != 1)}{which}"],
                detail={"page": beyond, "pages": len(numbers)},
                try_=[f"pages {numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else "leave the pages out"],
            )
    ranges = [(bisect_left(numbers, a), len(numbers) if b is None else bisect_right(numbers, b)) for a, b in spans]
    return {n for i, j in set(ranges) for n in numbers[i:j]}


def listed(pages: Sequence[int]) -> str:
    """Format page numbers for people: `1-3, 7, 9-12`, cut after a dozen."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and page == runs[-1][1] + 1:
            runs[-1][1] = page
        else:
            runs.append([page, page])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:SHOWN]]
    return ", ".join(words) + (f" and {len(runs) - SHOWN:,} more" if len(runs) > SHOWN else "")


# Parse jobs (input of a document reader) and parsed files (its result).


# pages of a PDF whose text is recognized (OCR): pictures without text and pages with unreadable fonts, none, or all
Ocr = Literal["auto", "off", "on"]
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
    ocr: Ocr = "off"
    progress: Callable[[int, int], None] | None = None  # gets page i of n while text is recognized
    known: Mapping[int, Sequence[LinePiece]] = field(default_factory=dict)  # lines of pages that were recognized before

    @property
    def recognizes(self) -> bool:
        """True if text of a page may have to be recognized."""
        is_known = self.spans and all(first == last and first in self.known for first, last in self.spans)
        return self.ocr == "on" or (self.ocr == "auto" and not is_known)


@dataclass(slots=True)
class Parsed:
    """A file in sections."""

    kind: str
    unit: Unit
    sections: list[Section]
    title: str | None = None
    n_pages: int | None = None
    without_text: list[int] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)  # pages whose fonts do not name their letters
    blank: int = 0
    notes: list[str] = field(default_factory=list)
    lines: dict[int, list[LinePiece]] = field(default_factory=dict)  # of pages whose text was recognized now


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


Unit = Literal["page", "heading", "chapter", "line"]
SIGNS: dict[Unit, str] = {"page": "p.", "heading": "§", "chapter": "§", "line": "l."}


class Counter(Protocol):
    """A tokenizer that can count tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Section:
    """A page, the text under a heading, a chapter, or a block of lines. Its text is never empty."""

    number: int  # page number, or else 1, 2, .. in order
    label: str  # label in a citation: "12", "Methods", "41-80"
    text: str  # without marks
    is_ocr: bool = False  # True if the text was recognized in a picture of the page


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name. `sha256` is the hash of the bytes of the file.

    `text` is the text for the model: a plain or markdown file unchanged, a file with pages with a mark before each
    page. A document built from a name and a text alone has no sections.
    """

    name: str
    text: str
    sha256: str
    unit: Unit = "line"
    sections: tuple[Section, ...] = ()
    kind: str = "text"  # one of sniff.KINDS
    without_text: tuple[int, ...] = ()  # pages that were read and have content but no text
    blank: int = 0  # number of pages that were read and have no content
    n_pages: int | None = None  # pages of the file, not only the requested ones; None if the file has no pages
    title: str | None = None
    notes: tuple[str, ...] = ()  # decisions and omissions of the reader, one sentence each
    _counts: dict[int, tuple[Counter, int]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def recognized(self) -> tuple[int, ...]:
        """Numbers of the sections whose text was recognized in a picture."""
        return tuple(section.number for section in self.sections if section.is_ocr)

    @property
    def lines(self) -> int:
        return self.text.count("\n") + (not self.text.endswith("\n"))

    def tokens(self, tokenizer: Counter) -> int:
        """Return the number of tokens of the text alone; computed once per tokenizer."""
        # a tokenizer may not be hashable; it is stored with the count, so that its id is not reused
        key = id(tokenizer)
        if key not in self._counts:
            with blame_files(tokenizer_failed):
                ids = tokenizer.encode(self.text, add_special_tokens=False)
            self._counts[key] = tokenizer, len(ids)
        return self._counts[key][1]


def scanned(name: str, empty: Sequence[int], kind: str) -> str:
    """Return the sentence about pages without text. Only pages of a PDF may be scanned."""
    return f"{name}: no text on page{'s' * (len(empty) > 1)} {listed(empty)}" + ", perhaps scanned" * (kind == "pdf")


def notes_of(document: Document) -> list[str]:
    """Return notes for the user on how a document was read, one sentence each."""
    empty = document.without_text
    return [*([scanned(document.name, empty, document.kind)] if empty else []), *document.notes]


def mark(unit: Unit, label: str) -> str:
    """Return the mark that precedes a section and cites it: `[p. 12]`, `[§ Methods]`, `[l. 41-80]`."""
    return f"[{SIGNS[unit]} {clean(label)}]"


def clean(label: str) -> str:
    """Clean a label or a name so that it cannot close its bracket or begin another citation."""
    return re.sub(r"\s+", " ", label.translate(_CLEAN)).strip(" ?")


_CLEAN = str.maketrans({"[": "(", "]": ")", ";": ","})


def marked(unit: Unit, sections: Sequence[Section]) -> str:
    """Join the sections, each under its mark on a separate line."""
    return "\n\n".join(f"{mark(unit, s.label)}\n{s.text.strip(chr(10))}" for s in sections) + "\n"


def with_documents(question: str, documents: Sequence[Document]) -> str:
    """Return the user message for a question about documents: texts first, then a blank line, then the question.

    A single document has no header, as in the training prompts of most models (and of the bundled one). Several
    documents get a header line each, so that the question can name them. This function alone defines the format. A line
    of a text that looks like such a header loses its equals signs: `(Document 2: contract)`.
    """
    if not documents:
        return question
    texts = [_HEAD.sub(_without_signs, document.text.strip("\n")) for document in documents]
    if len(documents) > 1:
        names = [re.sub(f"={{2,}}|[{_BREAKS}]+", " ", document.name) for document in documents]
        texts = [
            f"=== Document {i}: {name} ===\n{text}" for i, (name, text) in enumerate(zip(names, texts, strict=True), 1)
        ]
    return "\n\n".join([*texts, question] if question else texts)


def _without_signs(head: re.Match[str]) -> str:
    return f"({re.sub('={2,}', '', head[1]).strip()})"


_BREAKS = "\n-\r\x85\u2028\u2029"
_HEAD = re.compile(rf"(?<!=)={{2,}}+[^\S\n]*+(document[^\S\n]++\d++[^\S\n]*+:[^{_BREAKS}]*)", re.IGNORECASE)
