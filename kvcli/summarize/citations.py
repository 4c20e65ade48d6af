"""Find citations in an answer in any spelling, and write them in one format, with "?" if doubtful.

[p. 9, 41]   [p. 9-11]   [pp. 3 and 4]   (page 9)   [§ Methods]   [l. 41-80]   [a.pdf p. 3; b.pdf p. 4]
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from kvcli.documents.document import SIGNS, Unit, clean

DASH = "-\N{EN DASH}\N{EM DASH}\N{NON-BREAKING HYPHEN}\N{HYPHEN}"

_SIGN = re.compile(
    r"(?<![^\W_])(?:(?P<page>pp?\.(?![a-z])|pp?\s?:(?=\s?\d)|pgs?[.:]?(?=\s*\d)|pages?\s?:?(?=\s*\d)"
    r"|seiten?(?=\s*\d)|(?-i:S\.)(?=\s*\d))"
    r"|(?P<line>ll?\.(?![a-z])|lines\s?:?(?=\s*\d)|(?P<metro>line)\s?:?(?=\s*\d))"
    r"|(?P<bare>(?P<p>pp?)(?=\s+\d|\d)|ll?(?=\s+\d|\d))"
    r"|(?P<heading>§+)|(?P<word>(?:sections?|sec\.|chapters?|chap\.|ch\.)(?=\s*\d)))\s*",
    re.IGNORECASE,
)
_ENDS = r"(?=ff?\b|(?!\.?[^\W_]))"  # end of a number: not 3.5, not 2nd, not 2027.pdf
# a single comma before three digits is a thousands separator, unless more commas follow
_ITEM = re.compile(
    rf"(?P<first>(?<!,)\d{{1,2}},\d{{3}}(?!,?\d)|\d{{1,6}}){_ENDS}"
    rf"(?:\s*(?:[{DASH}]|\.{{2,3}}|…|to\b)\s*(?:(?:pp?\.?|ll?\.?)\s*)?(?P<last>\d{{1,6}}){_ENDS})?(?:\s?ff?\b\.?)?\s*\??",
    re.IGNORECASE,
)
_BETWEEN = {
    unit: re.compile(
        rf"\s*(?:(?:[,;/&|+]|\band\b)\s*(?:and\b\s*)?(?:(?:(?:see|also)\s+){{0,2}}(?:{sign})\s*)?|(?:{sign})\s*)(?=\d)",
        re.IGNORECASE,
    )
    for unit, sign in (("page", r"pp?\.?|pages?\b"), ("line", r"ll?\.?|lines?\b"))
}
_PREFIX = re.compile(
    r"[\s*_,;^]*+(?:(?:see|also|cf|vgl|siehe|cite|citation|sources?|quelle|refs?|from|on|at|in|and)\b[\s*_.,:]*+)*",
    re.IGNORECASE,
)
_FILE = re.compile(r"\w\.[a-z]\w{0,4}[\"'”’*_`]*+[\s,:]*+\Z", re.IGNORECASE)
# text that may follow a page number without being part of the claim
_DETAIL = re.compile(
    r"\W*+(?:(?<=[\s,])(?:table|tab|fig|figure|box|note|footnote|fn|lines?|l|para|paragraph|section|col)\b"
    r"[^;]*+|(?<=§).*+)?(?:and\b)?\W*+",
    re.IGNORECASE,
)
_QUOTES = "\"'`“”\N{LEFT SINGLE QUOTATION MARK}’*_"
_EDGE = f" \t\n,:;({_QUOTES}"


@dataclass(frozen=True, slots=True)
class Place:
    """A cited place in a document.

    `label` is that of the section ("12", "Methods", "41-80"); for pages and lines it may be a range. It is empty if a
    model began a citation without a place. `document` is empty if there is only one document. It may be an unknown
    name, as the model wrote it.
    """

    unit: Unit
    label: str
    document: str = ""

    @property
    def span(self) -> tuple[int, int] | None:
        """Return the first and last number of a page, a line or a range of them."""
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", self.label) if SIGNS[self.unit] != "§" else None
        return (int(found[1]), int(found[2] or found[1])) if found else None


@dataclass(frozen=True, slots=True)
class _Group:
    """A sign with the text before and after it."""

    name: str
    is_known: bool  # the name is known or empty
    sign: re.Match[str]
    labels: tuple[str, ...]  # numbers; empty for a heading
    rest: str  # text after the numbers; for a heading, all text after the sign


class Reader:
    """Parser of the text inside citation brackets, from sign to sign ("p.", "page", "l.", "§").

    A document name precedes a sign, and labels follow it. `documents` are names, also accepted without the file suffix.
    If "" is among them, there is only one document. Its places have no document name, whatever text precedes them.
    """

    def __init__(self, documents: Sequence[str] = ()) -> None:
        self._is_one = "" in documents
        called = {name: "" if self._is_one else name for name in documents}
        self._known = {clean(name).casefold(): own for name, own in called.items() if clean(name)}
        names = "|".join(re.escape(clean(n)) for n in sorted(called, key=len, reverse=True) if clean(n))
        stems = [name.rpartition(".")[0].casefold() for name in called]
        self._stems = {s: n for s, n in zip(stems, called.values(), strict=True) if s and stems.count(s) == 1}
        self._ends = (
            re.compile(rf"(?:\A|[\s;,({_QUOTES}])({names})[{_QUOTES}]*+[\s,:]*+\Z", re.IGNORECASE) if names else None
        )
        self._begins = re.compile(rf"(?:{names})[\s,:]+(?:pp?\.|ll?\.|§)", re.IGNORECASE) if names else None

    def read(self, inside: str, *, is_round: bool = False, is_open: bool = False, is_code: bool = False) -> list[Place]:
        """Return the named places, also those of unknown documents; [] if the text is no citation.

        Text in round brackets or in an unclosed bracket is rarely a citation. In round brackets all of it must be
        parsed; in unclosed brackets a sign or a known name must come first. In code, "p1" is text.
        """
        places: list[Place] = []
        signs = [sign for sign in _SIGN.finditer(inside) if not (is_code and sign["bare"])]
        for group in self._groups(inside, signs, is_strict=is_round or is_open):
            found = _in_round(group) if is_round else _in_square(group)
            if not found and (is_round or not places):
                return []
            inherits = places and not group.name
            places += [replace(p, document=places[-1].document) for p in found] if inherits else found
        return places

    def _groups(self, inside: str, signs: Sequence[re.Match[str]], *, is_strict: bool) -> list[_Group]:
        groups: list[_Group] = []
        at = 0  # offset up to which the text is parsed
        for sign in signs:
            if sign.start() < at:
                continue
            before, text = groups[-1] if groups else None, inside[at : sign.start()]
            labels, end = ((), sign.end()) if _is_titled(sign) else self._labels(inside, sign)
            if before is not None and _is_titled(before.sign) and ";" not in text:  # a heading continues until then
                if labels and _is_paged(text, sign, inside[end:], before, is_strict=is_strict):
                    groups[-1], at = replace(before, sign=sign, labels=labels, rest=inside[end:]), end
                continue
            lead = self._lead(text, before, is_strict=is_strict)
            if lead is None:
                continue
            name, is_known, cut = lead
            if not is_known and not _is_plain(sign):
                continue
            if before is not None:
                groups[-1] = replace(before, rest=text[:cut])
            at = end
            groups.append(_Group(name, is_known, sign, labels, inside[at:]))
        return groups

    def _lead(self, text: str, before: _Group | None, *, is_strict: bool) -> tuple[str, bool, int] | None:
        """Return the document of a sign, whether it is known, and the end of the previous group in the text.

        Return None if the sign begins no group: "p. 9, line 3" names one page.
        """
        cut = text.rfind(";")
        own = text[cut + 1 :]
        if self._ends and (match := self._ends.search(own)) and match[1].casefold() in self._known:
            return self._known[match[1].casefold()], True, cut if cut >= 0 else match.start()
        name = own[_PREFIX.match(own).end() :].strip(_EDGE)  # type: ignore[union-attr]
        if before is not None and cut < 0:
            name = name.rpartition(",")[2].strip(_EDGE)
            if not name:
                return None
        end = cut if cut >= 0 else own.rfind(name)
        if not name or name.casefold() in self._stems:
            return self._stems.get(name.casefold(), ""), True, end
        is_loose = not is_strict if before is None else cut >= 0 and not _is_titled(before.sign)
        is_file = bool(_FILE.search(own))
        return ("" if self._is_one and not is_file else name, False, end) if is_loose or is_file else None

    def _labels(self, text: str, sign: re.Match[str]) -> tuple[tuple[str, ...], int]:
        """Return the numbers and ranges after a sign, and their end."""
        labels: list[str] = []
        at = end = sign.end()
        while item := _ITEM.match(text, at):
            first = int(item["first"].replace(",", ""))
            last = int(item["last"] or first)
            labels.append(str(first) if first == last else f"{min(first, last)}-{max(first, last)}")
            end = item.end()
            between = _BETWEEN["page" if _is_page(sign) else "line"].match(text, end)
            if not between or (self._begins and self._begins.match(text, between.end())):
                break
            at = between.end()
        return tuple(labels), end


def _is_titled(sign: re.Match[str]) -> bool:
    return bool(sign["heading"] or sign["word"])


def _is_page(sign: re.Match[str]) -> bool:
    return bool(sign["page"] or sign["p"])


def _is_plain(sign: re.Match[str]) -> bool:
    """True if a sign is unambiguous: after unknown words, "p53" and "chapter 3" are text."""
    behind = sign.string[sign.end() : sign.end() + 1]
    return bool(sign["heading"]) or (not (sign["bare"] or sign["word"]) and behind.isdigit())


def _is_paged(text: str, sign: re.Match[str], rest: str, heading: _Group, *, is_strict: bool) -> bool:
    """True if a heading is followed by a page, which is more precise: "Section 4, p. 3"."""
    is_last = text.rstrip().endswith((",", ":", "(")) and not any(c.isalnum() for c in rest)
    is_text = is_strict and heading.sign["word"] and any(c.isalpha() for c in text)  # "(section 4 of it, p. 3)"
    return is_last and not is_text and _is_page(sign) and _is_plain(sign)


def _in_square(group: _Group) -> list[Place]:
    """Return the places of a group in square brackets. A number that cannot be parsed becomes a label unchanged."""
    if _is_titled(group.sign):
        label = clean((group.sign[0] if group.sign["word"] else "") + group.rest)
        return [Place("heading", label, group.name)] if label else []
    if group.sign["bare"] and any(c.isalnum() for c in group.rest):  # "[p 53 pathway]"
        return []
    is_prose = not _DETAIL.fullmatch(group.rest)
    if is_prose and not group.is_known and not _FILE.search(group.name):  # "[he said on page 9 that it fell]"
        return []
    return _numbered(group)


def _in_round(group: _Group) -> list[Place]:
    """Return the places of a group in round brackets if all of it is parsed: "(p. 9)", not "(p53)", "(p.05)"."""
    sign = group.sign
    behind = sign.string[sign.end() :]
    if sign["heading"]:  # laws have numbers: "(§ 433)"
        label = clean(group.rest)
        return [Place("heading", label, group.name)] if label[:1].isalpha() else []
    is_glued = sign["bare"] and not sign[0][-1].isspace()
    if sign["word"] or sign["metro"] or is_glued or behind.startswith("0") or not group.labels:
        return []
    if not _DETAIL.fullmatch(group.rest) or (sign["bare"] and any(c.isalnum() for c in group.rest)):
        return []
    return _numbered(group)


def _numbered(group: _Group) -> list[Place]:
    labels = group.labels or (clean(group.rest).rstrip(", "),)
    return [Place("page" if _is_page(group.sign) else "line", label, group.name) for label in labels]


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


def write(places: Sequence[Place], doubtful: Collection[Place] = (), recognized: Collection[Place] = ()) -> str:
    """Return one bracket for all places, with a question mark after doubtful ones, and OCR after recognized ones."""
    groups = []
    for (document, sign, is_ocr), group in groupby(places, key=lambda p: (p.document, SIGNS[p.unit], p in recognized)):
        labels = [clean(p.label) + "?" * (p in doubtful or not p.label) for p in group]
        name = f"{clean(document)} " if document else ""
        joined = ", ".join(labels) if sign != "§" else "; § ".join(labels)
        groups.append(f"{name}{sign} {joined}" + ", OCR" * is_ocr)
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
