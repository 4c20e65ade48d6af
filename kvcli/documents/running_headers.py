"""Detect running headers and footers: lines that recur near an edge over successive pages, page numbers ignored."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from kvcli.documents.reading_order import LinePiece, Row, row_text, rows, top

DEPTH = 3  # rows examined at each edge
FEW = 3  # successive pages on which a line must recur
SURE = 6  # the same for a line that may be a numbered heading
NEAR = 4  # largest page distance within a run: a line on left pages only, missing on one of them
MOST = 0.4  # smallest share of pages with text at the same place: half of them, less those that begin a chapter
PLACE = 6  # points by which lines of one place may differ
GAP = 1.3  # times the usual row distance, between running lines and the text
SHIFT = 30  # most pages of front matter that page numbers skip
LARGE = 1.2  # times the text size from which a number is a heading
SMALL = 0.85  # times the text size below which a line is no heading
ROMAN = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}
SIGNS = "-–—.|[]()"  # around a page number

NUMBER = "\0"  # replaces the page number in a key
Key = tuple[str, str]  # the edge, and the line without its page number


@dataclass(frozen=True, slots=True)
class Edge:
    """One row near an edge."""

    side: str  # "top" or "bottom"
    row: Row
    needs: dict[Key, int]  # for each key, successive pages on which it must recur
    # separate from the text: an attached row is removed only where others are separate, or with a page number
    is_apart: bool

    @property
    def counted(self) -> list[Key]:
        return [key for key in self.needs if self.is_apart or NUMBER in key[1]]

    @property
    def place(self) -> tuple[str, int]:
        return self.side, round(top(self.row) / PLACE)


def without_running(pages: Sequence[tuple[int, Sequence[LinePiece]]]) -> Iterator[list[LinePiece]]:
    """Yield the pieces of each page without running headers and footers. No page is left without text."""
    usual = median([piece.size for _, pieces in pages for piece in pieces] or [0.0])
    edges = {number: _edges(number, pieces, usual) for number, pieces in pages}
    running = _running(edges)
    for number, pieces in pages:
        gone = {id(piece) for row in _outermost(edges[number], running) for piece in row}
        yield [piece for piece in pieces if id(piece) not in gone] or list(pieces)


def _outermost(edges: Sequence[Edge], running: set[Key]) -> Iterator[Row]:
    """Yield the running rows, from either edge up to the first other row."""
    for _, inwards in itertools.groupby(edges, lambda edge: edge.side):
        for edge in itertools.takewhile(lambda edge: running & edge.needs.keys(), inwards):
            yield edge.row


def _running(pages: dict[int, list[Edge]]) -> set[Key]:
    """Return the keys of lines that recur on successive pages, at a place where most pages have text."""
    used, found = defaultdict[tuple[str, int], set[int]](set), defaultdict[Key, dict[int, int]](dict)
    for number, edges in pages.items():
        for side, place in {edge.place for edge in edges if edge.counted}:
            for near in (place - 1, place, place + 1):
                used[side, near].add(number)
    for number, edges in pages.items():
        for edge in edges:
            if len(used[edge.place]) >= MOST * len(pages):
                for key in edge.counted:
                    found[key][number] = edge.needs[key]
    return {key for key, needs in found.items() if _run(list(needs)) >= list(needs.values())[-1]}


def _run(numbers: Sequence[int]) -> int:
    """Return the length of the longest run of successive pages."""
    cuts = [i for i, (a, b) in enumerate(itertools.pairwise(numbers), 1) if b - a > NEAR]
    return max(b - a for a, b in itertools.pairwise([0, *cuts, len(numbers)]))


def _edges(number: int, pieces: Sequence[LinePiece], size: float) -> list[Edge]:
    """Return rows near the top and the bottom of a page; `size` is the text size of the document."""
    ordered = rows(pieces)
    if len(ordered) < 2:
        return []
    steps = [top(b) - top(a) for a, b in itertools.pairwise(ordered)]
    usual = median(steps)
    size = max(size, median(_size(row) for row in ordered))
    found = []
    for edge, order, gaps in (("top", ordered, steps), ("bottom", ordered[::-1], steps[::-1])):
        wide = [i for i, gap in enumerate(gaps[:DEPTH]) if gap > GAP * usual]
        for i, row in enumerate(order[:DEPTH]):
            needs = {(edge, key): n for key, n in _keys(row, number, size)}
            found.append(Edge(edge, row, needs, bool(wide) and i <= max(wide)))
    return found


def _size(row: Row) -> float:
    return max(piece.size for piece in row)


def _keys(row: Row, page: int, size: float) -> Iterator[tuple[str, int]]:
    """Yield keys of the line, with each number in it replaced by its distance to the page number, and pages required.

    A number larger than the text is a heading. Words of that size with a number may be one too: `Chapter 3` on page 3.
    """
    words = row_text(row).casefold().split()
    if not words:
        return
    yield f"{' '.join(words)} {_size(row):.0f}", FEW  # a title is larger than the header that repeats it
    alone = {piece.text.strip(f" {SIGNS}").casefold() for piece in row}
    for i, word in enumerate(words if _size(row) <= LARGE * size else ()):
        if (value := _value(word.strip(SIGNS))) is not None:
            before, behind = " ".join(words[:i]), " ".join(words[i + 1 :])
            is_sure = word.strip(SIGNS) in alone or _size(row) < SMALL * size
            if is_sure or abs(value - page) <= SHIFT:
                n = FEW if is_sure or not any(map(str.isalpha, before + behind)) else SURE
                yield f"{before} {NUMBER} {behind} {value - page:+d}", n


def _value(word: str) -> int | None:
    """Return a page number from digits or Roman numerals."""
    if word.isdecimal():
        return int(word[:9])
    if not word or not ROMAN.keys() >= set(word) or len(word) > 7:
        return None
    values = [ROMAN[c] for c in word]
    return sum(-v if v < max(values[i:]) else v for i, v in enumerate(values))
