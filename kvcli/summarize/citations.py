"""Find citations in an answer in any spelling, and write them in one format, with "?" if doubtful.

[p. 9, 41]   [p. 9-11]   [pp. 3 and 4]   (page 9)   [§ Methods]   [l. 41-80]   [a.pdf p. 3; b.pdf p. 4]
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvcli.documents.document import SIGNS, clean
from kvcli.summarize.citation_places import Place, Reader

__all__ = ["Bracket", "Place", "clean", "find", "same", "without", "write"]

LONGEST = 300  # characters of a bracket; longer brackets are text

# characters before a bracket in code, without a space: a[p1], \\cite{p. 1}, x_{p. 1}
_CODE = frozenset(string.ascii_letters + string.digits + "_\\}")
_WIDE = "\N{FULLWIDTH LEFT SQUARE BRACKET}", "\N{FULLWIDTH RIGHT SQUARE BRACKET}"
# Each pattern ends at a bracket of its kind or a square one; otherwise rows of open brackets would take quadratic time.
_OTHERS = "".join(
    f"|{re.escape(a)}([^{re.escape(a + b)}\\[\\]\\n]{{1,{LONGEST}}}){re.escape(b)}"
    for a, b in (("【", "】"), ("⟦", "⟧"), _WIDE, ("{", "}"))
)
_BRACKET = re.compile(
    rf"\[([^\[\]\n]{{1,{LONGEST}}})(?:\]|(?=\n)|\Z){_OTHERS}"
    rf"|(?P<round>[(\uff08])([^()\uff08\uff09\[\]\n]{{1,{LONGEST}}})[)\uff09]"
)


@dataclass(frozen=True, slots=True)
class Bracket:
    """One citation: text[start:end], and the places it names."""

    start: int
    end: int
    places: tuple[Place, ...]


def find(text: str, documents: Sequence[str] = ()) -> list[Bracket]:
    """Find all citations in order; citations separated only by spaces or a comma are merged. Never raises.

    `documents` are names that may precede a place. A place with another name is found too, but matches no document. If
    "" is among them, there is one document: text before a place names it, unless it looks like another file.
    """
    reader = Reader(documents)
    found: list[list[tuple[int, int, list[Place]]]] = []  # adjacent citations
    for match in _BRACKET.finditer(text):
        is_open = match[1] is not None and not match[0].endswith("]")
        is_curly, is_glued = match[0].startswith("{"), text[max(0, match.start() - 1) : match.start()] in _CODE
        if is_curly and is_glued:
            continue
        inside, is_round = match[match.lastindex or 0], match["round"] is not None
        places = reader.read(inside, is_round=is_round, is_open=is_open, is_code=is_curly or is_glued)
        if not places:
            continue
        if not found or not _is_seam(text[found[-1][-1][1] : match.start()]):
            found.append([])
        found[-1].append((match.start(), match.end(), places))
    return [_joined(row) for row in found]


def write(places: Sequence[Place], doubtful: Collection[Place] = ()) -> str:
    """Return one bracket for all places, with a question mark after doubtful ones."""
    groups = []
    for (document, sign), group in groupby(places, key=lambda p: (p.document, SIGNS[p.unit])):
        labels = [clean(p.label) + "?" * (p in doubtful or not p.label) for p in group]
        name = f"{clean(document)} " if document else ""
        joined = ", ".join(labels) if sign != "§" else "; § ".join(labels)
        groups.append(f"{name}{sign} {joined}")
    return f"[{'; '.join(groups)}]"


def without(text: str, brackets: Sequence[Bracket]) -> str:
    """Return the text without these brackets and the spaces before them."""
    kept, at = [], 0
    for bracket in brackets:
        kept.append(text[at : bracket.start].rstrip(" "))
        at = bracket.end
    return "".join([*kept, text[at:]]).strip()


def same(label: str) -> str:
    """Return a normalized heading: letters and digits in one case. C++ differs from C#."""
    return "".join(c for c in label.casefold().lstrip("# ") if c.isalnum() or c in "+#")


def _joined(row: Sequence[tuple[int, int, list[Place]]]) -> Bracket:
    places = [place for _, _, places in row for place in places]
    return Bracket(row[0][0], row[-1][1], tuple(dict.fromkeys(places) if len(row) > 1 else places))


def _is_seam(between: str) -> bool:
    return "\n" not in between and between.strip() in ("", ",", ";", "&", "and")
