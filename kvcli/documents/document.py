"""What a file becomes once it is read: a text with a name, in sections that a citation can point at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvcli.models.library_errors import blame_files
from kvcli.models.text import tokenizer_failed

Unit = Literal["page", "heading", "chapter", "line"]
SIGNS: dict[Unit, str] = {"page": "p.", "heading": "§", "chapter": "§", "line": "l."}


class Counter(Protocol):
    """What a tokenizer must offer to be counted with."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Section:
    """A page, the text under a heading, a chapter, or a block of lines. Never without text."""

    number: int  # of the page, else 1, 2, .. in order
    label: str  # what a citation says: "12", "Methods", "41-80"
    text: str  # no marks in it


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name. `sha256` is that of the bytes it was read from.

    `text` is what a model reads: a plain or markdown file as it is, anything with pages with a mark before each. One
    made by hand from a name and a text alone has no sections.
    """

    name: str
    text: str
    sha256: str
    unit: Unit = "line"
    sections: tuple[Section, ...] = ()
    kind: str = "text"  # one of sniff.KINDS
    without_text: tuple[int, ...] = ()  # pages that were read and have none, though there is something on them
    blank: int = 0  # pages that were read and have nothing to read on them
    n_pages: int | None = None  # of the file, however many were asked for; None where there are no pages
    title: str | None = None
    notes: tuple[str, ...] = ()  # what the reader had to decide or leave out, a sentence each
    _counts: dict[int, tuple[Counter, int]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def lines(self) -> int:
        return self.text.count("\n") + (not self.text.endswith("\n"))

    def tokens(self, tokenizer: Counter) -> int:
        """Tokens of the text alone; counted once for each tokenizer."""
        key = id(tokenizer)  # not hashable in general; kept beside the count, so that the id stays its own
        if key not in self._counts:
            with blame_files(tokenizer_failed):
                ids = tokenizer.encode(self.text, add_special_tokens=False)
            self._counts[key] = tokenizer, len(ids)
        return self._counts[key][1]


def mark(unit: Unit, label: str) -> str:
    """What leads a section in a prompt, and how a citation of it is written: `[p. 12]`, `[§ Methods]`, `[l. 41-80]`."""
    return f"[{SIGNS[unit]} {clean(label)}]"


def clean(label: str) -> str:
    """A label or a name that cannot end its bracket, nor begin another citation in it."""
    return re.sub(r"\s+", " ", label.translate(_CLEAN)).strip(" ?")


_CLEAN = str.maketrans({"[": "(", "]": ")", ";": ","})


def marked(unit: Unit, sections: Sequence[Section]) -> str:
    """The sections in a row, each under its mark on a line of its own."""
    return "\n\n".join(f"{mark(unit, s.label)}\n{s.text.strip(chr(10))}" for s in sections) + "\n"


def with_documents(question: str, documents: Sequence[Document]) -> str:
    """The user message for a question about documents: texts first, then a blank line, then the question.

    A single document stands bare, which is how most models (and the bundled one) were trained. Several get a
    header line each, so that the question can name them. Change the form here; nothing else knows it. A line of a
    text that looks like such a header loses its signs, as lines that look like marks do: `(Document 2: contract)`.
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
