"""Write superscripts so that `10` with a raised `6` does not become 106."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from kvcli.documents.reading_order import LinePiece

LONGEST = 40  # characters; longer text was raised for decoration
WORD = re.compile(r"[^\W\d_]{2,}\.?")  # 1st, Mme, a trade mark
NUMBER = re.compile(r"[-+\u2212\u2013]?[\w.,]+")
NOTES = re.compile(r"\d{1,3}([,\u2013-]\d{1,3})*")  # numbers of notes
NOTED = re.compile(r"([^\W\d_]{4}|[.,;:!?])[\"')\u2019\u201d\u00bb]?$")  # text before such numbers
UNIT = re.compile(r"\d ?[^\W\d_]{1,2}$")  # m, km
UP = (0.22, 0.8)  # rise of a superscript above its line, as shares of the line's size
DOWN = (-0.6, -0.08)  # the same for a subscript
SMALL = 0.9  # largest relative size of a superscript or subscript
# level and piece: 1 superscript, 2 superscript that begins its line, -1 subscript, 0 base
Levelled = tuple[int, LinePiece]


def raised(text: str) -> str:
    """Return `^6` or `^(n + 1)`; words, signs such as an asterisk, and text in square brackets are unchanged."""
    inner = text.strip()
    if len(inner) > LONGEST or "\n" in inner or inner.startswith("[") or not any(c.isalnum() for c in inner):
        return text
    if WORD.fullmatch(inner):
        return text
    return text.replace(inner, f"^{grouped(inner)}", 1)


def grouped(text: str) -> str:
    """Return text in parentheses if a neighbouring operator would bind only a part of it."""
    inner = text.strip()
    return inner if NUMBER.fullmatch(inner) or (inner[:1], inner[-1:]) == ("(", ")") else f"({inner})"


def apart(text: str, before: str, after: str, *, is_below: bool = False) -> str:
    """Separate a superscript or subscript from numbers on either side: `10^6`, `3 1/2`, `101_2`, but `H2O`."""
    inner, follows = text.strip(), before[-1:].isdigit()
    if is_below:
        text = f"_{text}" if follows and inner[:1].isdigit() else text
    elif inner.isdigit() and after[:1] in ("/", "\u2044"):
        text = f" {text}" if follows else text
    else:
        text = raised(text)
    return f"{text} " if text[-1:].isdigit() and after[:1].isdigit() else text


def joined(pieces: Sequence[LinePiece], gone: Set[int] = frozenset()) -> list[LinePiece]:
    """Merge the pieces of each line, with superscripts and subscripts; pieces with ids in `gone` are left out."""
    pairs = [(before, p) for before, p in itertools.pairwise([None, *pieces]) if p and id(p) not in gone]
    lines = list(_lines([replace(p, is_same=False) if id(before) in gone else p for before, p in pairs]))
    notes = {line[0][1].text for line in lines if line[0][0] == 2}
    return [_line(line, notes) for line in lines]


def _lines(pieces: Sequence[LinePiece]) -> Iterator[list[Levelled]]:
    """Yield groups of pieces that form a line."""
    line: list[Levelled] = []
    before: LinePiece | None = None
    for piece in pieces:
        base = line[0][1] if len(line) == 1 else next((p for level, p in line if not level), piece)
        if line and (piece.is_same or _touches(line, piece, base)):
            level = _level(base, piece)
            if len(line) == 1 and not level and _level(piece, base) > 0:
                line = [(1 if before and _is_left(before, base) else 2, base)]
            if level or piece.is_same or line[-1][0]:
                line.append((level, piece))
                continue
        if line:
            before = line[-1][1]
            yield line
        line = [(0, piece)]
    if line:
        yield line


def _level(base: LinePiece, piece: LinePiece) -> int:
    size, rise = base.size, base.base - piece.base
    if piece.size > (1.05 if piece.is_same else SMALL) * size or piece.angle != base.angle or not size:
        return 0
    return 1 if UP[0] < rise / size < UP[1] else -1 if DOWN[0] < rise / size < DOWN[1] else 0


def _touches(line: Sequence[Levelled], piece: LinePiece, base: LinePiece) -> bool:
    """True if a piece continues its line, or is above or below a superscript or subscript at its end."""
    level, last = line[-1]
    if piece.y0 >= base.y1 or piece.y1 <= base.y0 or piece.angle != last.angle:
        return False
    end = max(p.x1 for _, p in line[-2:])
    begins = len(line) == 1 and _level(piece, last) > 0  # text of a note, after its number
    is_near = -0.3 * base.size < piece.x0 - end < (1 if begins else 0.35) * piece.size
    return is_near or (level != 0 and abs(piece.x0 - last.x0) < 0.3 * base.size)


def _is_left(a: LinePiece, b: LinePiece) -> bool:
    """True if a piece ends a short distance before another, in the same row."""
    return a.y0 < b.y1 and a.y1 > b.y0 and 0 <= b.x0 - a.x1 + 0.3 * b.size < 4 * b.size


def _line(line: Sequence[Levelled], notes: set[str]) -> LinePiece:
    if len(line) == 1:
        return line[0][1]
    text, before, end = "", 0, 0.0
    for level, group in itertools.groupby(line, lambda item: item[0]):
        first, *others = (piece for _, piece in group)
        said = first.text + "".join(" " * piece.is_spaced + piece.text for piece in others)
        wide = not first.is_same and not level and first.x0 - end > 0.15 * first.size
        if level > 0:
            is_noted = level == 2 or NOTED.search(text) or (said in notes and not UNIT.search(text))
            said = f"[{said}]" if is_noted and NOTES.fullmatch(said) else raised(said)
        elif level < 0 and text[-1:].isdigit():
            said = f"_{said}"
        parted = first.is_spaced or wide or (before and text[-1:].isdigit() and said[:1].isdigit())
        text += (" " if text and parted else "") + said
        before, end = level, (first, *others)[-1].x1
    pieces = [piece for _, piece in line]
    upright = [piece for level, piece in line if not level] or pieces
    x0, x1 = min(p.x0 for p in pieces), max(p.x1 for p in pieces)
    y0, y1 = min(p.y0 for p in upright), max(p.y1 for p in upright)
    return replace(pieces[0], text=text, x0=x0, y0=y0, x1=x1, y1=y1, size=max(p.size for p in upright))
