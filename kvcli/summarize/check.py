"""Is the claim on the page that it names? Confirmed, moved to the one page that has it, or doubtful.

A claim is confirmed by a page with a sentence that has all its numbers, names and quotations and enough of its other
words, weighed by how rare they are in the text. A claim of several parts ("..., and ...") may take a sentence for
each. That says that the page has the words of the claim; it is no proof that the claim follows from them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from kvcli.documents.document import SIGNS
from kvcli.summarize.citations import Bracket, Place, clean, same, write
from kvcli.summarize.claim_words import Unit, Word, units, words
from kvcli.summarize.lexicon import Lexicon
from kvcli.summarize.result import Cite, Quote

MOST_PARTS = 12  # of a claim; what has more is no claim but a page
WIDEST = 5  # pages; a range of more says too little about where something stands

# Shares of a claim's weight that a sentence must have: of those with which `python tests/bench/citations.py --grid`
# found no error (docs/benchmarks/citations.json) high ones, which notice more other words
WITH_NUMBERS = 0.65  # where it has numbers or names, all of which must be there
WITHOUT = 0.8

_PARTS = re.compile(r"[;.](?=\s)|,?\s\b(?:and|but|while|whereas|with)\b", re.IGNORECASE)
_QUOTED = re.compile(r"[\"“„«]([^\"“”„«»]{8,})[\"”“»]")
ENDED = re.compile(r"[.!?:…\u3002\uff01\uff1f][\"')\]”’»]*\s*\Z")


@dataclass(frozen=True)
class Passage:
    """What stood of one section in one part: `text`, which begins at `offset` of the section."""

    place: Place
    text: str
    offset: int = 0

    @cached_property
    def units(self) -> list[Unit]:
        return units(self.text)


@dataclass(frozen=True)
class Claim:
    """A statement by its words. `parts`: where it may be cut, if no sentence has all of it."""

    text: str
    words: tuple[Word, ...]
    parts: tuple[tuple[Word, ...], ...]
    quoted: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Claim:
        found = words(text)
        cuts = [0, *(match.start() for match in _PARTS.finditer(text)), len(text)]
        parts = [tuple(w for w in found if a <= w.start < b) for a, b in pairwise(cuts)]
        quoted = [" ".join(w.key for w in words(match[1])) for match in _QUOTED.finditer(text)]
        return cls(text, tuple(found), tuple(filter(None, parts)), tuple(q for q in quoted if q.count(" ") >= 2))


@dataclass(frozen=True)
class Judged:
    """A citation after the check, and how it is written now."""

    cites: tuple[Cite, ...]
    text: str


class Checker:
    """Holds claims against the passages of one part."""

    def __init__(self, passages: Sequence[Passage], *, with_numbers: float = WITH_NUMBERS, without: float = WITHOUT):
        self.passages = list(passages)
        self.shares = with_numbers, without
        self.seams = [_seam(a, b) for a, b in pairwise(passages)]
        seam_units = [unit for seam in self.seams if seam for unit in seam.units]
        every = [unit for passage in passages for unit in passage.units]
        self.lexicon = Lexicon.of([p.text for p in passages], every + seam_units)

    def judge(self, claim: str, bracket: Bracket, *, quotes: bool = False) -> Judged:
        """The places of one citation: each confirmed, corrected or doubtful."""
        said = Claim.of(claim)
        cited = [self.at(place) for place in bracket.places]
        good = [bool(at) and self._is_good(said, at, cited) for at in cited]
        if not any(good) and (right := self._only_place(said)) is not None:
            place = self.passages[right].place
            doubted = write(bracket.places)[1:-1]
            quote = self.quote(claim, [right]) if quotes else None
            return Judged((Cite(place, True, doubted, quote),), write([place]))
        places = [self._own(place, at) for place, at in zip(bracket.places, cited, strict=True)]
        found = [
            Cite(place, ok, None, self.quote(claim, at) if quotes and ok else None)
            for place, ok, at in zip(places, good, cited, strict=True)
        ]
        doubtful = [place for place, ok in zip(places, good, strict=True) if not ok]
        return Judged(tuple(found), write(places, doubtful))

    def place(self, claim: str, *, quotes: bool = False) -> Judged | None:
        """A citation for a claim that has none: the one place that has it; else those it was said of, doubtful.

        None where these are too many to say anything.
        """
        if (right := self._only_place(Claim.of(claim))) is not None:
            place = self.passages[right].place
            return Judged((Cite(place, True, None, self.quote(claim, [right]) if quotes else None),), write([place]))
        every = list(dict.fromkeys(passage.place for passage in self.passages))
        return Judged(tuple(Cite(one, False) for one in every), write(every, every)) if len(every) < WIDEST else None

    def at(self, place: Place) -> list[int]:
        """Which passages a citation names; none if it is not of this part."""
        return named(place, [passage.place for passage in self.passages])

    def _own(self, place: Place, at: Sequence[int]) -> Place:
        """A heading or chapter as the document spells it. Pages and lines stay: they may be a range."""
        own = {self.passages[i].place for i in at}
        return own.pop() if SIGNS[place.unit] == "§" and len(own) == 1 else place

    def supports(self, claim: Claim, at: Collection[int]) -> bool:
        """Whether these passages together have the claim."""
        if not claim.words:
            return False
        sentences = self._units(at)
        lines = [unit.line for unit in sentences]
        if not all(any(f" {quoted} " in line for line in lines) for quoted in claim.quoted):
            return False
        if self._any_has(claim.words, [unit for unit in sentences if _touches_all(claim, unit)]):
            return True
        return 1 < len(claim.parts) <= MOST_PARTS and self._has_parts(claim, sentences)

    def quote(self, claim: str, at: Collection[int]) -> Quote | None:
        """The sentence of these passages that has most of the claim, exactly as it stands there."""
        wanted = self.lexicon.wanted(Claim.of(claim).words)
        best, most = None, 0.0
        for i in sorted(at):
            for unit in self.passages[i].units:
                if (overlap := wanted.overlap(unit)) > most:
                    best, most = (self.passages[i], unit), overlap
        if best is None:
            return None
        passage, unit = best
        start = passage.offset + unit.start
        return Quote(passage.text[unit.start : unit.end], start, start + unit.end - unit.start)

    def _is_good(self, claim: Claim, at: list[int], cited: list[list[int]]) -> bool:
        """Has the claim, or a part of it that the other cited passages lack while they have the rest."""
        if self.supports(claim, at):
            return True
        every = {i for one in cited for i in one}
        others = every - set(at)
        return bool(others) and self.supports(claim, every) and not self.supports(claim, others)

    def _only_place(self, claim: Claim) -> int | None:
        """The one passage that has the claim. A sentence that runs over a page's end stands where it begins."""
        found = [i for i in range(len(self.passages)) if self.supports(claim, [i])]
        if len(found) == 2 and found[1] == found[0] + 1 and self.seams[found[0]] is not None:
            own = [i for i in found if self._any_has(claim.words, self.passages[i].units)]
            found = own if len(own) == 1 else found[:1] if not own else found
        if len(found) > 1:  # several are near it; does one have all of it?
            found = [i for i in found if _has_it(claim.words, self.passages[i].units)]
        places = {(self.passages[i].place.document, self.passages[i].place.label) for i in found}
        return found[0] if len(places) == 1 else None

    def _units(self, at: Collection[int]) -> list[Unit]:
        """Sentences of these passages, those included that begin or end on the next page."""
        found = [unit for i in sorted(at) for unit in self.passages[i].units]
        for i, seam in enumerate(self.seams):
            if seam is not None and (i in at or i + 1 in at):
                found += seam.units
        return found

    def _has_parts(self, claim: Claim, sentences: Sequence[Unit]) -> bool:
        """Whether the claim can be cut so that each piece stands in a sentence."""
        n = len(claim.parts)
        reached = {0}  # parts behind which everything before stands somewhere
        for end in range(1, n + 1):
            for start in sorted(reached):
                piece = [word for part in claim.parts[start:end] for word in part]
                if n == end - start:  # the whole, which was looked for already
                    continue
                telling = _telling(piece, claim.text)
                stands = self._any_has(piece, sentences) if telling >= 3 else telling == 2 and _has_it(piece, sentences)
                if stands:
                    reached.add(end)
                    break
        return n in reached

    def _any_has(self, said: Sequence[Word], sentences: Sequence[Unit]) -> bool:
        """Whether one of these sentences has all numbers and names, and enough of the rest."""
        wanted = self.lexicon.wanted(said)
        least = self.shares[0 if wanted.musts else 1]
        return any(wanted.musts.keys() <= unit.keys and wanted.share(unit) >= least for unit in sentences)


def named(asked: Place, places: Sequence[Place]) -> list[int]:
    """Which places a citation means. Without a document's name it means none where there are several.

    Names and labels count as they are written; another spelling only where it can mean but one.
    """
    documents = {place.document for place in places}
    if asked.document not in documents:
        documents = {name for name in documents if name.casefold() == asked.document.casefold()}
        if len(documents) != 1:
            return []
        asked = replace(asked, document=documents.pop())
    here = [i for i, p in enumerate(places) if p.document == asked.document and SIGNS[p.unit] == SIGNS[asked.unit]]
    if (span := asked.span) is not None:
        wide = span[1] - span[0] >= WIDEST and asked.unit == "page"
        spans = {i: there for i in here if (there := places[i].span) is not None}
        return [i for i, there in spans.items() if not wide and span[0] <= there[1] and there[0] <= span[1]]
    exact = [i for i in here if clean(places[i].label) == clean(asked.label) != ""]
    alike = exact or [i for i in here if same(places[i].label) == same(asked.label) != ""]
    return alike if len({places[i].label for i in alike}) == 1 else []


def _seam(before: Passage, after: Passage) -> Passage | None:
    """The sentence that runs from one passage into the next, if one does."""
    if before.place.document != after.place.document or not before.units or not after.units:
        return None
    last, first = before.units[-1], after.units[0]
    text = before.text[last.start : last.end]
    if ENDED.search(text):
        return None
    return Passage(before.place, f"{text} {after.text[first.start : first.end]}")


def _telling(part: Sequence[Word], text: str) -> int:
    """Words by which a part of a claim can be looked for by itself: no units behind numbers, one number at most.

    Below two words that are no numbers there is nothing to look for.
    """
    telling = {word.key for i, word in enumerate(part) if not word.is_number and not _measures(part, i, text)}
    return len(telling) + any(word.is_number for word in part) if len(telling) >= 2 else 0


def _touches_all(claim: Claim, unit: Unit) -> bool:
    """Whether a sentence has something of each part that could stand alone: a long claim carries no foreign clause."""
    return all({w.key for w in part} & unit.keys for part in claim.parts if _telling(part, claim.text) >= 2)


def _has_it(part: Sequence[Word], sentences: Sequence[Unit]) -> bool:
    """Whether one of these sentences has every word of a part."""
    keys = {word.key for word in part}
    return any(keys <= unit.keys for unit in sentences)


def _measures(part: Sequence[Word], i: int, text: str) -> bool:
    """Whether a word follows a number at once, as a unit does: it says nothing about what was counted."""
    return i > 0 and part[i - 1].is_number and text[part[i - 1].end : part[i].start].strip() == ""
