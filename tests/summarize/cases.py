"""Claims about generated reports with what their citations are worth: what the checker is measured and tested with.

True claims are sentences of a page, word for word or put another way; false ones have a digit, a name, other words or
the page changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from kvcli.summarize.check import Passage
from tests.summarize import claims
from tests.summarize.claims import Make, drawn, report_pages, stands

Wanted = Literal["confirmed", "corrected", "doubtful"]


@dataclass(frozen=True)
class Case:
    """A claim citing a page of `pages`, and what must become of the citation."""

    kind: str
    pages: tuple[Passage, ...]
    claim: str
    page: str  # the label cited
    wanted: Wanted
    right: str  # the label of the page that has the claim; "" where none or several have


Maker = Callable[[str, Random, tuple[Passage, ...]], Case | None]


def cases(n: int, seed: int = 0, kinds: Sequence[str] = ()) -> Iterator[Case]:
    """So many cases of each kind, or of `kinds`, of about as many reports."""
    for kind in kinds or KINDS:
        make = KINDS[kind]
        done = number = 0
        while done < n:
            rng = Random(f"{seed} {kind} {number}")
            number += 1
            case = make(kind, rng, report_pages(rng))
            if case is not None:
                done += 1
                yield case


def _false(make: Make) -> Maker:
    return _case(make, "doubtful")


def _true(make: Make) -> Maker:
    return _case(make, "confirmed")


def _case(make: Make, wanted: Wanted) -> Maker:
    def case(kind: str, rng: Random, pages: tuple[Passage, ...]) -> Case | None:
        made = make(rng, pages)
        return Case(kind, pages, made[0], made[1], wanted, made[1] if wanted == "confirmed" else "") if made else None

    return case


def wrong_page(kind: str, rng: Random, pages: tuple[Passage, ...]) -> Case | None:
    """A true claim that cites another page, or one that is not there: it gets its own."""
    made = rng.choice([claims.verbatim, claims.shortened, claims.reworded])(rng, pages)
    if made is None or len(pages) < 3:
        return None
    claim, right = made
    if stands(claim, tuple(p for p in pages if p.place.label != right)):
        return None  # so short that two pages have it
    others = [p.place.label for p in pages if p.place.label != right] + [str(len(pages) + 7)]
    return Case(kind, pages, claim, rng.choice(others), "corrected", right)


def on_two_pages(kind: str, rng: Random, pages: tuple[Passage, ...]) -> Case | None:
    """A claim that stands on two pages and cites a third: nobody knows which was meant."""
    if len(pages) < 4:
        return None
    page, sentence = drawn(rng, pages)
    rest = [i for i, p in enumerate(pages) if p.place.label != page]
    also, cited = rng.sample(rest, 2)
    changed = list(pages)
    changed[also] = Passage(pages[also].place, f"{pages[also].text.rstrip()} {sentence}\n")
    return Case(kind, tuple(changed), sentence, pages[cited].place.label, "doubtful", "")


SHORT = ("Nobody was hurt.", "Taxes were left unchanged.", "The harvest failed.")


def with_short_clause(kind: str, rng: Random, pages: tuple[Passage, ...]) -> Case | None:
    """A claim with a clause of two words that mean something, which the page has in a sentence of its own."""
    return _short(kind, rng, pages, "confirmed")


def with_foreign_clause(kind: str, rng: Random, pages: tuple[Passage, ...]) -> Case | None:
    """The same, with a clause that stands on another page."""
    return _short(kind, rng, pages, "doubtful")


def _short(kind: str, rng: Random, pages: tuple[Passage, ...], wanted: Wanted) -> Case | None:
    if len(pages) < 3:
        return None
    page, sentence = drawn(rng, pages)
    clause = rng.choice(SHORT)
    rest = [i for i, p in enumerate(pages) if (p.place.label == page) == (wanted == "confirmed")]
    changed, also = list(pages), rng.choice(rest)
    changed[also] = Passage(pages[also].place, f"{pages[also].text.rstrip()} {clause}\n")
    claim = f"{sentence.removesuffix('.')}{rng.choice([' and ', ', while '])}{clause[0].lower()}{clause[1:]}"
    return Case(kind, tuple(changed), claim, page, wanted, page if wanted == "confirmed" else "")


# Those of which every case must come out right
SURE: dict[str, Maker] = {
    "verbatim": _true(claims.verbatim),
    "shortened": _true(claims.shortened),
    "reworded": _true(claims.reworded),
    "number in another spelling": _true(claims.number_respelt),
    "halves swapped": _true(claims.swapped_order),
    "two sentences in one": _true(claims.two_joined),
    "with a short clause": with_short_clause,
    "wrong page": wrong_page,
    "digit changed": _false(claims.digit_changed),
    "another number of the page": _false(claims.number_of_the_page),
    "sign, scale or unit changed": _false(claims.amount_changed),
    "name changed": _false(claims.name_changed),
    "of another report": _false(claims.foreign),
    "with a short clause of another page": with_foreign_clause,
    "on two pages, citing a third": on_two_pages,
}
# Those that a comparison of words finds in part: how many, the benchmark tells
PARTLY: dict[str, Maker] = {
    "one plain word changed": _false(claims.plain_changed(1)),
    "two plain words changed": _false(claims.plain_changed(2)),
    "three plain words changed": _false(claims.plain_changed(3)),
    "an unknown name in front": _false(claims.name_in_front),
}
KINDS = SURE | PARTLY
