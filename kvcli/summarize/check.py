"""Check a claim against the page that it cites: confirm it, move it to the only page that has it, or mark it doubtful.

A page confirms a claim by a sentence with all its numbers, names and quotations, and enough of its other words,
weighted by their rarity in the text, and more if they replace one of its words. A claim of several parts ("..., and
...") may use a sentence for each part.
Confirmation means that the page has the words of the claim; it does not prove that the claim follows from them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from kvcli.documents.document import SIGNS, clean
from kvcli.summarize.citations import Place, same, write
from kvcli.summarize.claim_words import Unit, Word, units, words
from kvcli.summarize.lexicon import Lexicon
from kvcli.summarize.result import Cite, Point, Quote

MOST_PARTS = 12  # of a claim; longer statements are no claims
WIDEST = 5  # pages; a wider range is too vague for a citation

# Share of a claim's weight that a sentence must have: the middle one of the values in docs/benchmarks/citations.json
# (`grid`) at which every generated claim was judged right.
ENOUGH = 0.65

_PARTS = re.compile(r"[;.](?=\s)|,?\s\b(?:and|but|while|whereas|with)\b", re.IGNORECASE)
_QUOTED = re.compile(r"[\"“„«]([^\"“”„«»]{8,})[\"”“»]")
ENDED = re.compile(r"[.!?:…\u3002\uff01\uff1f][\"')\]”’»]*\s*\Z")


@dataclass(frozen=True)
class Passage:
    """Text of a section within one part; `text` begins at `offset` of the section."""

    place: Place
    text: str
    offset: int = 0
    is_ocr: bool = False  # recognized in a picture

    @cached_property
    def units(self) -> list[Unit]:
        return units(self.text)


@dataclass(frozen=True)
class Claim:
    """A statement by its words. `parts`: pieces to check separately, if no sentence has the whole statement."""

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


def with_ocr(point: Point, passages: Sequence[Passage]) -> Point:
    """Return the point with citations of recognized text marked as such."""
    places = [passage.place for passage in passages if passage.is_ocr]
    marked = (
        replace(one, is_ocr=bool(named(one.place, places))) if isinstance(one, Cite) else one for one in point.said
    )
    return replace(point, said=tuple(marked)) if places else point


class Checker:
    """Compares claims with the passages of one part."""

    def __init__(self, passages: Sequence[Passage], *, enough: float = ENOUGH):
        self.passages = list(passages)
        self.enough = enough
        self.seams = [_seam(a, b) for a, b in pairwise(passages)]
        seam_units = [unit for seam in self.seams if seam for unit in seam.units]
        every = [unit for passage in passages for unit in passage.units]
        self.lexicon = Lexicon.of([p.text for p in passages], every + seam_units)

    def judge(self, claim: str, places: Sequence[Place], *, quotes: bool = False) -> tuple[Cite, ...]:
        """Check the places of one citation: each is confirmed or doubtful, or one other place is put for all."""
        said = Claim.of(claim)
        cited = [self.at(place) for place in places]
        good = [bool(at) and self._is_good(said, at, cited) for at in cited]
        if not any(good) and (right := self._only_place(said)) is not None:
            quote = self.quote(claim, [right]) if quotes else None
            return (Cite(self.passages[right].place, True, write(places)[1:-1], quote),)
        return tuple(
            Cite(self._own(place, at), ok, None, self.quote(claim, at) if quotes and ok else None)
            for place, ok, at in zip(places, good, cited, strict=True)
        )

    def place(self, claim: str, *, quotes: bool = False) -> tuple[Cite, ...]:
        """Return a citation for a claim without one: the only place that has it.

        Otherwise all places of the part are cited as doubtful, or none if they are too many.
        """
        if (right := self._only_place(Claim.of(claim))) is not None:
            return (Cite(self.passages[right].place, True, None, self.quote(claim, [right]) if quotes else None),)
        every = dict.fromkeys(passage.place for passage in self.passages)
        return tuple(Cite(one, False) for one in every) if len(every) < WIDEST else ()

    def at(self, place: Place) -> list[int]:
        """Return the indices of the passages that a citation names; [] if it names none of this part."""
        return named(place, [passage.place for passage in self.passages])

    def _own(self, place: Place, at: Sequence[int]) -> Place:
        """Return a heading or chapter as the document spells it. Pages and lines are unchanged: they may be ranges."""
        own = {self.passages[i].place for i in at}
        return own.pop() if SIGNS[place.unit] == "§" and len(own) == 1 else place

    def supports(self, claim: Claim, at: Collection[int]) -> bool:
        """True if these passages together have the claim."""
        if not claim.words:
            return False
        sentences = self._units(at)
        lines = [unit.line for unit in sentences]
        if not all(any(f" {quoted} " in line for line in lines) for quoted in claim.quoted):
            return False
        if any(_touches_all(claim, unit) for unit in self._having(claim.words, sentences)):
            return True
        return 1 < len(claim.parts) <= MOST_PARTS and self._has_parts(claim, sentences)

    def quote(self, claim: str, at: Collection[int]) -> Quote | None:
        """Return the sentence of these passages with the largest overlap with the claim, unchanged."""
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
        """True if passages `at` have the claim, or a part that the other cited passages need to have it all."""
        if self.supports(claim, at):
            return True
        every = {i for one in cited for i in one}
        others = every - set(at)
        return bool(others) and self.supports(claim, every) and not self.supports(claim, others)

    def _only_place(self, claim: Claim) -> int | None:
        """Return the only passage that has the claim. A sentence across pages belongs to the page where it begins."""
        found = [i for i in range(len(self.passages)) if self.supports(claim, [i])]
        if len(found) == 2 and found[1] == found[0] + 1 and self.seams[found[0]] is not None:
            own = [i for i in found if any(self._having(claim.words, self.passages[i].units))]
            found = own if len(own) == 1 else found[:1] if not own else found
        if len(found) > 1:  # several have most of it: prefer one with every word
            found = [i for i in found if _has_it(claim.words, self.passages[i].units)]
        places = {(self.passages[i].place.document, self.passages[i].place.label) for i in found}
        return found[0] if len(places) == 1 else None

    def _units(self, at: Collection[int]) -> list[Unit]:
        """Return the sentences of these passages, including those that begin or end on a neighbouring page."""
        found = [unit for i in sorted(at) for unit in self.passages[i].units]
        for i, seam in enumerate(self.seams):
            if seam is not None and (i in at or i + 1 in at):
                found += seam.units
        return found

    def _has_parts(self, claim: Claim, sentences: Sequence[Unit]) -> bool:
        """True if the claim can be cut so that a sentence has each piece."""
        n = len(claim.parts)
        reached = {0}  # numbers of leading parts that are found
        for end in range(1, n + 1):
            for start in sorted(reached):
                piece = [word for part in claim.parts[start:end] for word in part]
                if n == end - start:  # the whole claim was checked before
                    continue
                telling = _telling(piece, claim.text)
                stands = (
                    any(self._having(piece, sentences)) if telling >= 3 else telling == 2 and _has_it(piece, sentences)
                )
                if stands:
                    reached.add(end)
                    break
        return n in reached

    def _having(self, said: Sequence[Word], sentences: Sequence[Unit]) -> Iterator[Unit]:
        """Yield those of these sentences that have all numbers and names, and enough of the other words."""
        wanted = self.lexicon.wanted(said)
        having = (unit for unit in sentences if wanted.musts.keys() <= unit.keys)
        return (unit for unit in having if wanted.has_enough(unit, self.enough))


def named(asked: Place, places: Sequence[Place]) -> list[int]:
    """Return the indices of the places that a citation means.

    Without a document name the result is [] if there are several documents. Names and labels match exactly.
    Another spelling matches only if it is unambiguous.
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
    """Return the sentence that runs from one passage into the next, if there is one."""
    if before.place.document != after.place.document or not before.units or not after.units:
        return None
    last, first = before.units[-1], after.units[0]
    text = before.text[last.start : last.end]
    if ENDED.search(text):
        return None
    return Passage(before.place, f"{text} {after.text[first.start : first.end]}")


def _telling(part: Sequence[Word], text: str) -> int:
    """Count the words of a part that can be searched separately: no units after numbers, and at most one number.

    With fewer than two words that are no numbers, the count is 0.
    """
    telling = {word.key for i, word in enumerate(part) if not word.is_number and not _measures(part, i, text)}
    return len(telling) + any(word.is_number for word in part) if len(telling) >= 2 else 0


def _touches_all(claim: Claim, unit: Unit) -> bool:
    """True if a sentence shares a word with each separable part, so that a long claim hides no foreign clause."""
    return all({w.key for w in part} & unit.keys for part in claim.parts if _telling(part, claim.text) >= 2)


def _has_it(part: Sequence[Word], sentences: Sequence[Unit]) -> bool:
    """True if one of these sentences has every word of a part."""
    keys = {word.key for word in part}
    return any(keys <= unit.keys for unit in sentences)


def _measures(part: Sequence[Word], i: int, text: str) -> bool:
    """True if a word directly follows a number, as a unit does: it does not name the thing counted."""
    return i > 0 and part[i - 1].is_number and text[part[i - 1].end : part[i].start].strip() == ""
