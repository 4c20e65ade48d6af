"""Split a document into parts that fit one prompt, at page ends, else paragraph ends, else sentence ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvcli.documents import Document, Section, Unit
from kvcli.schemas.base import SURROGATE
from kvcli.summarize.check import Passage
from kvcli.summarize.citations import Place, write
from kvcli.summarize.claim_words import sentences

Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Piece:
    """section.text[start:end] of one document."""

    document: str  # document name; empty if there is only one
    unit: Unit
    section: Section
    start: int
    end: int

    @property
    def place(self) -> Place:
        return Place(self.unit, self.section.label, self.document)

    @property
    def text(self) -> str:
        """Text of the piece in a prompt; a whole section has the same text as in a chat about the document."""
        text = self.section.text[self.start : self.end]
        return text.strip("\n") if text == self.section.text else text.strip()


@dataclass(frozen=True, slots=True)
class AsRead:
    """Documents that are in the KV cache already, as they are in its prompt."""

    text: str
    system: str | None = None  # the message before it


@dataclass(frozen=True)
class Part:
    """A part of the text for one prompt. `number` counts from 1."""

    number: int
    pieces: tuple[Piece, ...]
    cite: bool = True  # True if pieces have marks
    read: AsRead | None = None  # the earlier prompt of all of it, if there was one

    @cached_property
    def text(self) -> str:
        return self.read.text if self.read else "\n\n".join(shown(piece, self.cite) for piece in self.pieces)

    @property
    def passages(self) -> list[Passage]:
        """Passages that citations are compared with."""
        return [Passage(p.place, p.section.text[p.start : p.end], p.start, p.section.is_ocr) for p in self.pieces]

    @property
    def span(self) -> tuple[Place, Place]:
        """The first and the last place."""
        return self.pieces[0].place, self.pieces[-1].place


def shown(piece: Piece, cite: bool) -> str:
    return f"{write([piece.place])}\n{piece.text}" if cite else piece.text


def pieces_of(documents: Sequence[Document]) -> list[Piece]:
    """Return all sections, uncut. Citations have document names, made unique, only if there are several documents."""
    names = names_of(documents)
    return [
        Piece(name, document.unit, section, 0, len(section.text))
        for name, document in zip(names, documents, strict=True)
        for section in document.sections
        if section.text.strip()
    ]


def cut(pieces: Sequence[Piece], most: int, count: Count, *, cite: bool = True, overlap: int = 0) -> list[Part]:
    """Return parts of at most `most` tokens, about equally long; each repeats up to `overlap` tokens of the last."""
    room = max(1, most - overlap)
    atoms = [atom for piece in pieces for atom in _atoms(piece, room, count, cite)]
    n = len(_packed(atoms, room))
    low, high = max((size for _, size in atoms), default=1), room
    while low < high:  # find the smallest size that needs no more parts
        middle = (low + high) // 2
        low, high = (low, middle) if len(_packed(atoms, middle)) <= n else (middle + 1, high)
    packed = [_joined(group) for group in _packed(atoms, high)]
    heads = [_tail(before, overlap, count, cite) for before in [[], *packed[:-1]]]
    return [Part(i, (*head, *group), cite) for i, (head, group) in enumerate(zip(heads, packed, strict=False), 1)]


def _atoms(piece: Piece, most: int, count: Count, cite: bool) -> Iterator[tuple[Piece, int]]:
    """Yield the piece itself if it is small enough, or else its fragments; each with its tokens."""
    todo = [piece]
    while todo:
        one = todo.pop(0)
        size = count(shown(one, cite)) + 2  # plus the separator between two
        halves = _halves(one) if size > most else []
        if halves:
            todo = [*halves, *todo]
        else:
            yield one, size


def _halves(piece: Piece) -> list[Piece]:
    """Cut at the paragraph end nearest the middle, or else at a sentence end, a line end, a word end, or anywhere."""
    text = piece.section.text
    inside = text[piece.start : piece.end]
    middle = len(inside) // 2
    ends = [
        [m.end() for m in re.finditer(r"\n\s*\n", inside)],
        [end for _, end in sentences(inside)],
        [m.end() for m in re.finditer(r"\n", inside)],
        [m.end() for m in re.finditer(r"\s", inside)],
        [middle],
    ]
    near = next(found for one in ends if (found := [e for e in one if abs(e - middle) <= middle // 2]))
    at = piece.start + min(near, key=lambda e: abs(e - middle))
    halves = [replace(piece, end=at), replace(piece, start=at)]
    return halves if all(half.start < half.end for half in halves) else []


def _packed(atoms: Sequence[tuple[Piece, int]], most: int) -> list[list[Piece]]:
    groups: list[list[Piece]] = []
    used = most + 1
    for piece, size in atoms:
        if used + size > most:
            groups.append([])
            used = 0
        groups[-1].append(piece)
        used += size
    return groups


def _joined(group: Sequence[Piece]) -> list[Piece]:
    """Merge consecutive pieces of one section."""
    found: list[Piece] = []
    for piece in group:
        last = found[-1] if found else None
        if last is not None and last.section is piece.section and last.end == piece.start:
            found[-1] = replace(last, end=piece.end)
        else:
            found.append(piece)
    return found


def _tail(group: Sequence[Piece], most: int, count: Count, cite: bool) -> list[Piece]:
    """Return the last sentences of a part, as many as fit into `most` tokens."""
    found: list[Piece] = []
    for piece in reversed(group) if most else ():
        text = piece.section.text
        starts = [piece.start + start for start, _ in sentences(text[piece.start : piece.end])]
        tails = [replace(piece, start=start) for start in starts]
        rest = most - sum(count(shown(one, cite)) + 2 for one in found)
        longest = next((one for one in tails if count(shown(one, cite)) + 2 <= rest), None)
        if longest is None:
            break
        found.insert(0, longest)
        if longest.start > (starts[0] if starts else piece.start):
            break
    return found


def names_of(documents: Sequence[Document]) -> list[str]:
    """Return the name of each document in citations; "" if there is only one."""
    if len(documents) < 2:
        return [""] * len(documents)
    names: list[str] = []
    for document in documents:
        own = SURROGATE.sub("\N{REPLACEMENT CHARACTER}", document.name)  # a tokenizer takes only valid text
        name, n = own, 2
        while name in names:
            name, n = f"{own} ({n})", n + 1
        names.append(name)
    return names


def spoken_names(documents: Sequence[Document]) -> list[str]:
    """Return names that may be in citations, preceded by "" if there is only one document, whose name is optional."""
    return names_of(documents) if len(documents) > 1 else ["", *(document.name for document in documents)]
