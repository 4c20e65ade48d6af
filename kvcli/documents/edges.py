"""Running headers and footers: lines that recur at the same edge on most pages, page numbers counted alike."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from kvcli.documents.lines import Piece, Row, row_text, rows

DEPTH = 3  # rows looked at from each edge
MOST = 0.5  # share of the pages of either side (left or right hand) on which a line recurs
FEW = 3  # pages on which a line must recur at least
GAP = 1.3  # times the usual distance of rows, between what runs and the text
NUMBER = re.compile(r"\d+|\b[ivxlc]{1,7}\b", re.IGNORECASE)
ROMAN = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}

COUNTS = "\0"  # begins the key of a line with a page number in a place of its own

Key = tuple[str, str]  # the edge, and the line with its page number taken out


@dataclass(frozen=True, slots=True)
class Edge:
    """One row near an edge, and what would make it a running one."""

    side: str  # "top" or "bottom"
    row: Row
    keys: tuple[Key, ...]


def without_running(pages: Sequence[tuple[int, Sequence[Piece]]]) -> Iterator[list[Piece]]:
    """The pieces of each page less its running headers and footers. A page is never left without text by that."""
    looked = [(number, pieces, _edges(number, pieces)) for number, pieces in pages]
    running = _running([(number, edges) for number, _, edges in looked])
    for _, pieces, edges in looked:
        gone = {id(piece) for row in _outermost(edges, running) for piece in row}
        rest = [piece for piece in pieces if id(piece) not in gone]
        yield rest or list(pieces)


def _outermost(edges: Sequence[Edge], running: set[Key]) -> Iterator[Row]:
    """The rows that run, from either edge up to the first that does not."""
    for side in ("top", "bottom"):
        inwards = (edge for edge in edges if edge.side == side)
        for edge in itertools.takewhile(lambda edge: running & set(edge.keys), inwards):
            yield edge.row


def _running(pages: Sequence[tuple[int, Sequence[Edge]]]) -> set[Key]:
    found: set[Key] = set()
    for side in (0, 1):
        turn = [edges for number, edges in pages if number % 2 == side]
        other = [edges for number, edges in pages if number % 2 != side]
        counts = Counter(key for edges in turn for key in {k for edge in edges for k in edge.keys})
        beyond = Counter(key for edges in other for key in {k for edge in edges for k in edge.keys})
        for key, n in counts.items():
            if (n > MOST * len(turn) or key[1].startswith(COUNTS)) and n + beyond[key] >= FEW:
                found.add(key)
    return found


def _edges(number: int, pieces: Sequence[Piece]) -> list[Edge]:
    """The rows near the top and the bottom of a page."""
    ordered = rows(pieces)
    if len(ordered) < 2:
        return []
    tops = [min(p.y0 for p in row) for row in ordered]
    steps = [b - a for a, b in itertools.pairwise(tops)]
    usual = median(steps)
    found = []
    for edge, order, gaps in (("top", ordered, steps), ("bottom", ordered[::-1], steps[::-1])):
        wide = [i for i, gap in enumerate(gaps[:DEPTH]) if gap > GAP * usual]
        for i, row in enumerate(order[:DEPTH]):
            apart = bool(wide) and i <= max(wide)
            found.append(Edge(edge, row, tuple((edge, key) for key in _keys(row, number, apart))))
    return found


def _keys(row: Row, page: int, apart: bool) -> Iterator[str]:
    """The line itself, and for each number in it the line with that number as its distance from the page.

    A line of the text that only looks alike but for its numbers is no header, so a number must count with the pages;
    and the line must stand apart from the text, or say nothing beside the number.
    """
    line = " ".join(row_text(row).split()).casefold()
    if not line:
        return
    yield f"{line} {max(piece.height for piece in row):.0f}"  # a title is set larger than the header that repeats it
    alone = {piece.text.strip(" -–—.|[]()").casefold() for piece in row}
    for found in NUMBER.finditer(line):
        value = _value(found[0])
        rest = line[: found.start()] + "#" + line[found.end() :]
        if value is not None and (apart or len(re.findall(r"[^\W\d_]", rest)) <= len("page of")):
            # front matter and chapters have headers of their own, so such a line need not recur on most pages
            counts = COUNTS if apart and found[0] in alone else ""
            yield f"{counts}{rest} {value - page:+d}"


def _value(word: str) -> int | None:
    """A page number in digits or in Roman numerals."""
    if word.isdigit():
        return int(word[:9])
    values = [ROMAN[c] for c in word]
    return sum(-v if v < max(values[i:]) else v for i, v in enumerate(values))
