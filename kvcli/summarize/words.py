"""What a claim and a page are compared by: numbers, names and the other words that mean something."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvcli.summarize.cites import find
from kvcli.summarize.numbers import amount, number_of

Kind = Literal["number", "name", "word"]

# Chinese and Japanese have no spaces; there each character is a word
_CJK = r"[\u3040-\u30ff\u3400-\u9fff]"
_LETTER = rf"(?:(?!{_CJK})\w)"
_WORD = re.compile(rf"{_CJK}|{_LETTER}+(?:['’.,]{_LETTER}+)*")
_FULL = r"\u3002\uff01\uff1f"  # full stop, exclamation and question mark of Chinese and Japanese
_HEADED = r"(?m:^#{1,6}[ \t][^\n]*(?:\n|\Z))"  # a heading of markdown is a sentence, and so is each item of a list
_DOTS = (
    rf"(?<![.!?…{_FULL}])[.!?…{_FULL}]+[\"')\]”’»]*(?=\s|\Z)"  # begun at the first dot only, else a row takes squares
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
    describes described given""".split()
)
ABBREVIATED = frozenset(
    "dr mr mrs ms prof no nos vs fig figs p pp st e.g i.e approx inc ltd co cf etc al jr sr".split()
)
PRONOUNS = frozenset("he she it they this these those such both its their his her".split())
MOST_CAPITALS = 0.25  # of all words inside sentences; with more (German, titles) a capital says nothing about names
NEAR = 16  # characters before a dot that say whether it ends a sentence: more than any abbreviation has
UNSEEN = 2.0  # weight of a word that no sentence has, most often the writer's own: less than that of a rare word


@dataclass(frozen=True, slots=True)
class Word:
    """One word as it is compared, and where it stands."""

    key: str
    start: int
    end: int
    is_capital: bool = False  # in the text, and not because a sentence begins
    leads: bool = False  # a sentence
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """A sentence: text[start:end] of its passage, with what it says."""

    start: int
    end: int
    keys: frozenset[str]
    line: str  # its words in order, for quotations


def words(text: str) -> list[Word]:
    """All words that mean something. Citations in the text are no part of it."""
    text = blank(text)
    found: list[Word] = []
    over = 0  # what stands before it is said
    for match in _WORD.finditer(text):
        if match.start() < over:
            continue
        raw, leads = match[0], bool(_STARTS.search(text, max(0, match.start() - 12), match.start()))
        for key, is_number in _keys(raw):
            if is_number and number_of(raw.casefold()):
                said, end, over = amount(key, text, match)
                found += [Word(k, match.start(), end, False, leads, True) for k in said]
                continue
            capital = raw[0].isupper() and not is_number
            found.append(Word(key, match.start(), match.end(), capital and not leads, leads, is_number))
    return found


def blank(text: str) -> str:
    """The text with spaces for its citations: page numbers in them are no numbers that it tells."""
    kept, at = [], 0
    for bracket in find(text.replace("\n", " ")):  # one may be broken over two lines
        kept += [text[at : bracket.start], " " * (bracket.end - bracket.start)]
        at = bracket.end
    return "".join([*kept, text[at:]])


def sentences(text: str) -> list[tuple[int, int]]:
    """Spans of sentences and list items. One that leans on the one before it ("It ...") is one with it."""
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
    """The sentences of a text with their words."""
    found, inside = [], words(text)
    i = 0
    for start, end in sentences(text):
        keys = []
        while i < len(inside) and inside[i].start < end:
            keys.append(inside[i].key)
            i += 1
        found.append(Unit(start, end, frozenset(keys), f" {' '.join(keys)} "))
    return found


@dataclass(frozen=True)
class Lexicon:
    """What the words of a text are worth: those that few sentences have weigh most."""

    texts: tuple[str, ...]
    counts: Counter[str]  # key -> sentences
    n: int  # sentences

    @classmethod
    def of(cls, texts: Sequence[str], sentences: Iterable[Unit]) -> Lexicon:
        all_units = list(sentences)
        return cls(tuple(texts), Counter(key for unit in all_units for key in unit.keys), len(all_units))

    def weight(self, key: str) -> float:
        """ln(1 + sentences / those with it)."""
        return math.log(1 + self.n / self.counts[key]) if self.counts[key] else UNSEEN

    def kind(self, word: Word) -> Kind:
        if word.is_number:
            return "number"
        if not self._capitals_name or word.key in self._small:
            return "word"
        return "name" if word.is_capital or (word.leads and word.key in self._capital) else "word"

    @cached_property
    def _capital(self) -> frozenset[str]:
        """Words with a capital inside a sentence."""
        return frozenset(word.key for word in self._words if word.is_capital)

    @cached_property
    def _small(self) -> frozenset[str]:
        """Words that also come without one: no names."""
        return frozenset(w.key for w in self._words if not w.is_capital and not w.leads and not w.is_number)

    @cached_property
    def _capitals_name(self) -> bool:
        n = sum(len(_WORD.findall(text)) for text in self.texts)
        return sum(word.is_capital for word in self._words) <= MOST_CAPITALS * n

    @cached_property
    def _words(self) -> list[Word]:
        return [word for text in self.texts for word in words(text)]


def _keys(raw: str) -> list[tuple[str, bool]]:
    """How a word is compared: (key, whether it is a number). None of a word that says nothing."""
    plain = unicodedata.normalize("NFKC", raw).casefold().replace("’", "'").replace("\u00ad", "")
    plain = plain.removesuffix("'s").strip("_'.,")
    if number := number_of(plain):
        return [(number, True)]
    if any(c.isdigit() for c in plain):  # a code, as K482 or 3rd
        return [(plain, True)]
    if "." in plain or "," in plain:  # words without a space between them
        return [pair for part in re.split(r"[.,]", plain) if part for pair in _keys(part)]
    return [] if not plain or plain in STOP else [(stem(plain), False)]


def stem(word: str) -> str:
    """A word without the endings that number and tense give it in English. Light: it never joins two nouns."""
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
