"""Documents: the text of a file with a name, in sections that a citation can name."""

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
    """A tokenizer that can count tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Section:
    """A page, the text under a heading, a chapter, or a block of lines. Its text is never empty."""

    number: int  # page number, or else 1, 2, .. in order
    label: str  # label in a citation: "12", "Methods", "41-80"
    text: str  # without marks


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
