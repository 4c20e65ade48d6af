"""Citations in an answer: found however a model writes them, and written back in one form, with "?" where doubtful.

[p. 9, 41]   [p. 9-11]   [pp. 3 and 4]   (page 9)   [§ Methods]   [l. 41-80]   [a.pdf p. 3; b.pdf p. 4]
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvcli.documents.document import SIGNS, Unit

LONGEST = 300  # characters of a bracket; what is longer is text
DASH = "-\N{EN DASH}\N{EM DASH}\N{NON-BREAKING HYPHEN}\N{HYPHEN}"

_BRACKET = re.compile(rf"\[([^\[\]\n]{{1,{LONGEST}}})(?:\]|(?=\n)|\Z)|\(((?:see\s+)?p[^()\n]{{1,40}})\)", re.IGNORECASE)
_KIND = re.compile(
    r"\s*(?:see\s+)?(?:(?P<page>pp?\.|(?P<bare>pp?)(?=\s+\d)|pg\.?(?=\s*\d)|pages?(?=\s*\d))"
    r"|(?P<line>ll?\.|(?P<stark>ll?)(?=\s+\d)|lines?(?=\s*\d))|(?P<heading>§+))\s*",
    re.IGNORECASE,
)
_ITEM = re.compile(rf"(\d{{1,6}})(?!\d)(?:\s*(?:[{DASH}]|to\b)\s*(?:pp?\.\s*|ll?\.\s*)?(\d{{1,6}})(?!\d))?\s*(\?)?")
_BETWEEN = re.compile(r"\s*(?:,|/|&|\band\b)\s*(?:and\b\s*)?(?:pp?\.|pages?\b|ll?\.|lines?\b)?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands.

    `label` is that of the section ("12", "Methods", "41-80"); of pages and lines it may be a range. It is empty where
    a model began a citation and named no place. `document` is empty where there is only one.
    """

    unit: Unit
    label: str
    document: str = ""

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last number of a page, a line or a range of them."""
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", self.label) if SIGNS[self.unit] != "§" else None
        return (int(found[1]), int(found[2] or found[1])) if found else None


@dataclass(frozen=True, slots=True)
class Bracket:
    """One citation: text[start:end], and the places it names."""

    start: int
    end: int
    places: tuple[Place, ...]


def find(text: str, documents: Sequence[str] = ()) -> list[Bracket]:
    """All citations in order. `documents`: names that may stand before a place. Never raises."""
    names = "|".join(re.escape(clean(n)) for n in sorted(documents, key=len, reverse=True) if clean(n))
    named = re.compile(rf"\s*(?:see\s+)?({names})[\s,:]+", re.IGNORECASE) if names else None
    known = {clean(name).casefold(): name for name in documents}
    found = []
    for match in _BRACKET.finditer(text):
        inside = match[1] or match[2]
        places: list[Place] = []
        for group in inside.split(";"):  # a group without a name is about the document of the one before
            places += _places(group, named, known, places[-1].document if places else "")
        if places and (match[1] or any(place.label for place in places)):
            found.append(Bracket(match.start(), match.end(), tuple(places)))
    return found


def write(places: Sequence[Place], doubtful: Collection[Place] = ()) -> str:
    """One bracket for all places; those that are doubtful with a question mark."""
    groups = []
    for (document, sign), group in groupby(places, key=lambda p: (p.document, SIGNS[p.unit])):
        labels = [clean(p.label) + "?" * (p in doubtful or not p.label) for p in group]
        name = f"{clean(document)} " if document else ""
        joined = ", ".join(labels) if sign != "§" else "; § ".join(labels)
        groups.append(f"{name}{sign} {joined}")
    return f"[{'; '.join(groups)}]"


def without(text: str, brackets: Sequence[Bracket]) -> str:
    """The text without these, and without the spaces before them."""
    kept, at = [], 0
    for bracket in brackets:
        kept.append(text[at : bracket.start].rstrip(" "))
        at = bracket.end
    return "".join([*kept, text[at:]]).strip()


def same(label: str) -> str:
    """What two spellings of a heading have in common: letters and digits, in one case. C++ is not C#."""
    return "".join(c for c in label.casefold().lstrip("# ") if c.isalnum() or c in "+#")


def clean(label: str) -> str:
    """A label or a name that cannot end its bracket, nor begin another citation in it."""
    return re.sub(r"\s+", " ", label.translate(_CLEAN)).strip(" ?")


_CLEAN = str.maketrans({"[": "(", "]": ")", ";": ","})


def _places(group: str, named: re.Pattern[str] | None, known: dict[str, str], document: str) -> list[Place]:
    """Of "a.pdf pp. 3, 9-11": a page and a range; of what is no citation, none."""
    if named and (match := named.match(group)):
        document, group = known[match[1].casefold()], group[match.end() :]
    kind = _KIND.match(group)
    if kind is None:
        return []
    rest = group[kind.end() :]
    if kind["heading"]:
        label = clean(rest)
        return [Place("heading", label, document)] if label else []
    unit: Unit = "page" if kind["page"] else "line"
    labels, end = _labels(rest)
    if (kind["bare"] or kind["stark"]) and rest[end:].strip():  # "(p 53 pathway)"
        return []
    return [Place(unit, label, document) for label in labels]


def _labels(text: str) -> tuple[list[str], int]:
    """Numbers and ranges at the beginning, one empty label where there are none; and where they end."""
    labels, at, end = [], 0, 0
    while item := _ITEM.match(text, at):
        first, last = int(item[1]), int(item[2] or item[1])
        labels.append(str(first) if first == last else f"{min(first, last)}-{max(first, last)}")
        end = item.end()
        if not (between := _BETWEEN.match(text, end)):
            break
        at = between.end()
    return labels or [""], end
