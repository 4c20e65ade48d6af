"""Words for comparing a claim with a page: numbers, names and other content words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import KeysView, Mapping
from dataclasses import dataclass

from kvcli.summarize.citations import find
from kvcli.summarize.numbers import NUMBER, read
from kvcli.summarize.units import CJK, LETTER, heads

_WORD = rf"{CJK}|{LETTER}+(?:['’.,]{LETTER}+)*"
_TOKEN = re.compile(rf"(?P<number>{NUMBER})|{_WORD}", re.IGNORECASE)
_FULL = r"\u3002\uff01\uff1f"  # full stop, exclamation and question mark of Chinese and Japanese
_HEADED = r"(?m:^#{1,6}[ \t][^\n]*(?:\n|\Z))"  # a markdown heading is a sentence, and so is each list item
_DOTS = (
    # starts at the first dot only, otherwise a row of dots takes quadratic time
    rf"(?<![.!?…{_FULL}])[.!?…{_FULL}]+[\"')\]”’»]*(?=\s|\Z)"
)
_ENDS = re.compile(rf"{_HEADED}|{_DOTS}|[{_FULL}]|\n\s*\n|\n(?=\s*(?:[-*•–]|\d+[.)])\s)")
_STARTS = re.compile(rf"(?:\A|[.!?:…{_FULL}]|\n\s*\n)[\s\"'(“\u2018«*#•–-]*\Z")

STOP = frozenset(
    """a about above after again all also although an and any are as at be because been before being below between both
    but by can could did do does doing down during each either else for from further had has have having he her here
    hers him his how i if in into is it its itself just may me might more most must my neither no nor not now of off on
    once one only or other our out over own per rather same shall she should since so some such than that the their them
    then there these they this those through thus to too under until up upon us very was we were what when where
    whereas which while who whom whose why will with within without would yet you your p pp mr mrs ms dr prof
    according said say says states stated reports reported report document notes noted note mentions mentioned
    describes described given however moreover furthermore additionally overall finally notably meanwhile therefore
    hence instead despite similarly likewise consequently nevertheless specifically importantly summary
    overview""".split()
)
ABBREVIATED = frozenset(
    "dr mr mrs ms prof no nos vs fig figs p pp st e.g i.e approx inc ltd co cf etc al jr sr".split()
)
PRONOUNS = frozenset("he she it they this these those such both its their his her".split())
NEAR = 16  # characters before a dot that are checked for an abbreviation: longer than any abbreviation


@dataclass(frozen=True, slots=True)
class Word:
    """One word in its normalized form, with its position."""

    key: str
    start: int
    end: int
    is_capital: bool = False
    leads: bool = False  # begins a sentence
    is_number: bool = False
    is_bare: bool = False  # a number without a unit, in a line or column of numbers

    @property
    def stands_out(self) -> bool:
        """True if a word has a capital letter and does not begin a sentence."""
        return self.is_capital and not self.leads


@dataclass(frozen=True, slots=True)
class Unit:
    """A sentence: text[start:end] of its passage, with its normalized words."""

    start: int
    end: int
    spots: Mapping[str, list[int]]  # word -> its places among the words, from 0
    line: str  # its words in order, for quotations

    @property
    def keys(self) -> KeysView[str]:
        return self.spots.keys()


def words(text: str) -> list[Word]:
    """Return all content words of a text, without its citations."""
    text = blank(text)
    found: list[Word] = []
    over = 0  # end of the last number with its unit
    for match in _TOKEN.finditer(text):
        if match.start() < over:
            continue
        leads = bool(_STARTS.search(text, max(0, match.start() - 12), match.start()))
        if match["number"]:
            said = read(match)
            over = said.over
            found += [Word(k, match.start(), said.end, False, leads, True, said.is_bare) for k in said.keys]
            continue
        for key, is_code in _keys(match[0]):
            capital = match[0][0].isupper() and not is_code
            found.append(Word(key, match.start(), match.end(), capital, leads, is_code))
    return found


def blank(text: str) -> str:
    """Return the text with spaces in place of its citations, because their page numbers are no content.

    A citation of another text ("[Smith 2020, p. 45]") is kept, because a claim may mention it.
    """
    kept, at = [], 0
    for bracket in find(text.replace("\n", " ")):  # a citation may be broken over two lines
        if any(place.document for place in bracket.places):
            continue
        kept += [text[at : bracket.start], " " * (bracket.end - bracket.start)]
        at = bracket.end
    return "".join([*kept, text[at:]])


def sentences(text: str) -> list[tuple[int, int]]:
    """Return spans of sentences and list items. A sentence with a leading pronoun ("It ...") joins the one before."""
    spans: list[tuple[int, int]] = []
    at = 0
    for match in [*_ENDS.finditer(text), None]:
        end = match.end() if match else len(text)
        if match and match[0].startswith(".") and _is_abbreviated(text[max(at, match.start() - NEAR) : match.start()]):
            continue
        start = at + len(text[at:end]) - len(text[at:end].lstrip())
        stop = at + len(text[at:end].rstrip())
        at = end
        if stop <= start:
            continue
        first = re.match(r"\w+", text[start:stop])
        if spans and first and first[0].lower() in PRONOUNS and "\n\n" not in text[spans[-1][1] : start]:
            spans[-1] = spans[-1][0], stop
        else:
            spans.append((start, stop))
    return spans


def units(text: str) -> list[Unit]:
    """Return the sentences of a text with their words. A bare number of a table may have the unit of any column."""
    found, inside, columns = [], words(text), heads(text)
    i = 0
    for start, end in sentences(text):
        spots: dict[str, list[int]] = {}
        first, place, before = i, -1, -1
        while i < len(inside) and inside[i].start < end:
            word = inside[i]
            place += word.start > before  # a number and the same number with its unit are at one place
            before = word.start
            for key in [word.key, *(f"{word.key} {unit}" for unit in columns if word.is_bare)]:
                spots.setdefault(key, []).append(place)
            i += 1
        found.append(Unit(start, end, spots, f" {' '.join(word.key for word in inside[first:i])} "))
    return found


def n_words(text: str) -> int:
    """Count all words, including stop words."""
    return sum(1 for _ in re.finditer(_WORD, text))


def _keys(raw: str) -> list[tuple[str, bool]]:
    """Return (key, is number) pairs of a word; [] for a stop word."""
    raised = re.sub(r"(?<=\d)(?=[\u2070\u00b9\u00b2\u00b3\u2074-\u2079])", "^", raw)  # x10⁶ is not x106
    plain = unicodedata.normalize("NFKC", raised).casefold().replace("’", "'").replace("\u00ad", "")
    plain = plain.removesuffix("'s").strip("_'.,")
    if any(c.isdigit() for c in plain):  # a code, such as K482 or 3rd
        return [(plain, True)]
    if "." in plain or "," in plain:  # words without a space between them
        return [pair for part in re.split(r"[.,]", plain) if part for pair in _keys(part)]
    return [] if not plain or plain in STOP else [(stem(plain), False)]


def stem(word: str) -> str:
    """Return a word without English endings of number and tense. The stemming is light: it never merges two nouns."""
    for ending, instead in (("ies", "y"), ("ing", ""), ("ed", ""), ("es", ""), ("s", "")):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            word = word[: -len(ending)] + instead
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "aeiouls":
        word = word[:-1]  # stopped, stop
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


def _is_abbreviated(before: str) -> bool:
    last = re.search(r"([\w.]+)\Z", before)
    return last is not None and (last[1].lower() in ABBREVIATED or (len(last[1]) == 1 and last[1].isupper()))
