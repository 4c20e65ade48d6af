"""Running headers and footers: what recurs at one place near an edge on a run of pages, page numbers counted alike."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from kvcli.documents.reading_order import LinePiece, Row, row_text, rows, top

DEPTH = 3  # rows looked at from each edge
FEW = 3  # pages of a run on which a line must recur
SURE = 6  # pages of a run where it may as well be a heading with a number of its own
NEAR = 4  # pages from one of a run to the next: a side without it between them, of left and right ones
MOST = 0.4  # share of the pages with something at the same place: half of them, less those that begin a chapter
PLACE = 6  # points that lines of one place may differ by
GAP = 1.3  # times the usual distance of rows, between what runs and the text
SHIFT = 30  # pages of front matter, at most, that such a number does not count
LARGE = 1.2  # times the size of the text from which on a number is a heading
SMALL = 0.85  # times that size below which a line is no heading
ROMAN = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}
SIGNS = "-–—.|[]()"  # around the number of a page

NUMBER = "\0"  # stands for the page number in a key
Key = tuple[str, str]  # the edge, and the line with its page number taken out


@dataclass(frozen=True, slots=True)
class Edge:
    """One row near an edge."""

    side: str  # "top" or "bottom"
    row: Row
    needs: dict[Key, int]  # on how many pages of a run each of its keys must stand
    is_apart: bool  # from the text: one that is not goes only where others are, or with a page number

    @property
    def counted(self) -> list[Key]:
        return [key for key in self.needs if self.is_apart or NUMBER in key[1]]

    @property
    def place(self) -> tuple[str, int]:
        return self.side, round(top(self.row) / PLACE)


def without_running(pages: Sequence[tuple[int, Sequence[LinePiece]]]) -> Iterator[list[LinePiece]]:
    """The pieces of each page less its running headers and footers. A page is never left without text by that."""
    usual = median([piece.size for _, pieces in pages for piece in pieces] or [0.0])
    edges = {number: _edges(number, pieces, usual) for number, pieces in pages}
    running = _running(edges)
    for number, pieces in pages:
        gone = {id(piece) for row in _outermost(edges[number], running) for piece in row}
        yield [piece for piece in pieces if id(piece) not in gone] or list(pieces)


def _outermost(edges: Sequence[Edge], running: set[Key]) -> Iterator[Row]:
    """The rows that run, from either edge up to the first that does not."""
    for _, inwards in itertools.groupby(edges, lambda edge: edge.side):
        for edge in itertools.takewhile(lambda edge: running & edge.needs.keys(), inwards):
            yield edge.row


def _running(pages: dict[int, list[Edge]]) -> set[Key]:
    """The keys of lines that stand on a run of pages, at a place where most pages have something."""
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
    """The most of these pages that follow each other."""
    cuts = [i for i, (a, b) in enumerate(itertools.pairwise(numbers), 1) if b - a > NEAR]
    return max(b - a for a, b in itertools.pairwise([0, *cuts, len(numbers)]))


def _edges(number: int, pieces: Sequence[LinePiece], size: float) -> list[Edge]:
    """The rows near the top and the bottom of a page, in a document whose text is of that size."""
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
    """The line, and with each number in it as its distance from the page; on how many pages of a run each must stand.

    A number larger than the text is a heading. So may be words of that size with a number: `Chapter 3` on page 3.
    """
    words = row_text(row).casefold().split()
    if not words:
        return
    yield f"{' '.join(words)} {_size(row):.0f}", FEW  # a title is set larger than the header that repeats it
    alone = {piece.text.strip(f" {SIGNS}").casefold() for piece in row}
    for i, word in enumerate(words if _size(row) <= LARGE * size else ()):
        if (value := _value(word.strip(SIGNS))) is not None:
            before, behind = " ".join(words[:i]), " ".join(words[i + 1 :])
            is_sure = word.strip(SIGNS) in alone or _size(row) < SMALL * size
            if is_sure or abs(value - page) <= SHIFT:
                n = FEW if is_sure or not any(map(str.isalpha, before + behind)) else SURE
                yield f"{before} {NUMBER} {behind} {value - page:+d}", n


def _value(word: str) -> int | None:
    """A page number in digits or in Roman numerals."""
    if word.isdecimal():
        return int(word[:9])
    if not word or not ROMAN.keys() >= set(word) or len(word) > 7:
        return None
    values = [ROMAN[c] for c in word]
    return sum(-v if v < max(values[i:]) else v for i, v in enumerate(values))
