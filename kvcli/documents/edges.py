"""Running headers and footers: lines that recur at the same edge on most pages, page numbers counted alike."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from kvcli.documents.lines import Piece, Row, row_text, rows, top

DEPTH = 3  # rows looked at from each edge
MOST = 0.5  # share of the pages of either side (left or right hand) on which a line recurs
FEW = 3  # pages on which a line must recur at least
NEARLY = 0.75  # share of the pages of either side on which a title with a page number in the size of the text recurs
SURE = 6  # pages on which it must recur at least: in a short file, a chapter a page is more likely
GAP = 1.3  # times the usual distance of rows, between what runs and the text
LARGE = 1.2  # times the usual size of the page and of the document from which on a number is a heading
SMALL = 0.85  # times that size below which a line is no heading, whichever words stand beside its number
LONGEST = 200  # characters of a line that can be a page number and what stands beside it
NUMBER = re.compile(r"\d+|\b[ivxlc]{1,7}\b")
LETTERS = re.compile(r"[^\W\d_]+")
# words for a page, and between its number and that of the last one
PAGE = frozenset(
    "page pages p pg pp of seite s von de sur pagina página pág di sida sid av side af strona str z oldal sivu "
    "страница стр из σελίδα από 第 页 頁 共 ページ blad van sheet slide folio".split()
)
# words that part a numbered thing, a chapter or an invoice a page, from a title beside a page number
THINGS = frozenset(
    "no nr num number nummer numéro número chapter kapitel section part lesson question exhibit case invoice".split()
)
SIGNS = "-–—|·•/"  # part a page number from the title that runs beside it
ROMAN = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}

COUNTS = "\0"  # begins the key of a line with a page number in a place of its own
ALONE = "\1"  # begins the key of a line that says nothing beside its page number
TITLED = "\2"  # begins the key of a line that may as well be a heading with a number of its own

Key = tuple[str, str]  # the edge, and the line with its page number taken out


@dataclass(frozen=True, slots=True)
class Edge:
    """One row near an edge, and what would make it a running one."""

    side: str  # "top" or "bottom"
    row: Row
    keys: tuple[Key, ...]
    is_apart: bool  # from the text: one that is not goes only where others are


def without_running(pages: Sequence[tuple[int, Sequence[Piece]]]) -> Iterator[list[Piece]]:
    """The pieces of each page less its running headers and footers. A page is never left without text by that."""
    usual = median([piece.size for _, pieces in pages for piece in pieces] or [0.0])
    looked = [(number, pieces, _edges(number, pieces, usual)) for number, pieces in pages]
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
        counts, beyond = _counts(turn), _counts(other)
        for key, n in counts.items():
            if _recurs(key[1], n / len(turn), n + beyond[key]):
                found.add(key)
    return found


def _recurs(line: str, share: float, n: int) -> bool:
    """Whether it stands on enough of the pages of its side, and on enough in all."""
    if line.startswith(TITLED):
        return share >= NEARLY and n >= SURE
    return (share > MOST or line.startswith(COUNTS)) and n >= FEW


def _counts(pages: Sequence[Sequence[Edge]]) -> Counter[Key]:
    """On how many pages a line stands apart from the text, or is nothing but the number of a page."""
    return Counter(
        key
        for edges in pages
        for key in {k for edge in edges for k in edge.keys if edge.is_apart or k[1].startswith(ALONE)}
    )


def _edges(number: int, pieces: Sequence[Piece], size: float) -> list[Edge]:
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
            keys = tuple((edge, key) for key in _keys(row, number, size))
            found.append(Edge(edge, row, keys, bool(wide) and i <= max(wide)))
    return found


def _size(row: Row) -> float:
    return max(piece.size for piece in row)


def _keys(row: Row, page: int, size: float) -> Iterator[str]:
    """The line itself, and for each number in it the line with that number as its distance from the page.

    A line of the text that only looks alike but for its numbers is no header, so a number must count with the pages.
    `Chapter 3` on page 3 is none either: beside a page number stand words for a page, or a title in small type, or one
    that a sign parts from it, or one of some words that recurs with the right number on nearly all pages.
    """
    line = " ".join(row_text(row).split()).casefold()
    if not line:
        return
    yield f"{line} {max(piece.height for piece in row):.0f}"  # a title is set larger than the header that repeats it
    alone = {piece.text.strip(" -–—.|[]()").casefold() for piece in row}
    for found in NUMBER.finditer(line) if _size(row) <= LARGE * size and len(line) <= LONGEST else ():
        before, behind = line[: found.start()], line[found.end() :]
        key = f"{before}#{behind} {_value(found[0]) - page:+d}"
        if PAGE.issuperset(LETTERS.findall(f"{before} {behind}")):
            yield ALONE + key
        if found[0] in alone:
            # front matter and chapters have headers of their own, so such a line need not recur on most pages
            yield COUNTS + key
        elif _size(row) < SMALL * size or _is_parted(before, behind):
            yield key
        elif _is_titled(before, behind):
            yield TITLED + key


def _is_titled(before: str, behind: str) -> bool:
    """Whether words of a title stand on one side of a number that may be that of a page."""
    words, more = LETTERS.findall(before), LETTERS.findall(behind)
    if (words and more) or before[-1:].strip() or behind[:1].strip() or THINGS.intersection(words[-1:]):
        return False
    return sum(len(word) > 1 and word not in PAGE for word in words + more) > 1


def _is_parted(before: str, behind: str) -> bool:
    """Whether the title beside a page number ends with a sign or a word for a page, or begins with a sign."""
    words, more = LETTERS.findall(before), LETTERS.findall(behind)
    if PAGE.issuperset(more):
        return PAGE.issuperset(words[-1:]) or (before[-1:] == " " and before[-2:-1] in SIGNS)
    return not words and behind[:1] == " " and behind[1:2] in SIGNS


def _value(word: str) -> int:
    """A page number in digits or in Roman numerals."""
    if word.isdigit():
        return int(word[:9])
    values = [ROMAN[c] for c in word]
    return sum(-v if v < max(values[i:]) else v for i, v in enumerate(values))
