"""Claims about generated reports with what their citations are worth: what the checker is measured and tested with.

True claims are sentences of a page, word for word or put another way; false ones have a digit, a name or the page
changed. The reports are those of `kvcli.demo.report`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from kvcli.demo.report import write_report
from kvcli.demo.words import place as place_name
from kvcli.summarize.check import Passage
from kvcli.summarize.cites import Place
from kvcli.summarize.words import sentences, words

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


def report_pages(rng: Random) -> tuple[Passage, ...]:
    """The pages of a new report, without marks."""
    report = write_report(rng, 1_500 + 2_500 * rng.random(), 0.4)
    found = re.split(r"^\[p\. \d+\]\n", report.text, flags=re.MULTILINE)[1:]
    return tuple(Passage(Place("page", str(i)), text) for i, text in enumerate(found, 1) if text.strip())


# --- true, and on the page cited


def verbatim(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    page, sentence = _sentence(rng, pages)
    return sentence, page


def shortened(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """Without its last words, or without its adjectives."""
    page, sentence = _sentence(rng, pages)
    for cut in (" while ", " because ", ", the last", " and the "):
        if cut in sentence:
            return sentence.partition(cut)[0] + ".", page
    if re.match(r"The .+ of .+ is ", sentence):
        return None  # without its value it says nothing
    kept = sentence.removesuffix(".").split()
    return (" ".join(kept[:-1]) + ".", page) if len(kept) > 6 else None


def reworded(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """Another frame, other endings, other typography."""
    page, sentence = _sentence(rng, pages)
    claim = re.sub(r"^The (\S+ of .+?) is (.+)\.$", r"\2 is given as the \1.", sentence)
    claim = re.sub(r"\b(\w{4,})ed\b", r"\1ing", claim, count=1)
    claim = claim.replace("-", "\N{NON-BREAKING HYPHEN}").replace("metres", "m").replace(" and ", " & ")
    frame = rng.choice(["It is reported that {}", "{}", "According to the report, {}", "The team notes: {}"])
    return frame.format(claim), page


def swapped_order(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """The second half first."""
    page, sentence = _sentence(rng, pages)
    first, joint, second = sentence.removesuffix(".").partition(rng.choice([" while ", " because ", ", "]))
    return (f"{second[0].upper()}{second[1:]}{joint.rstrip()} {first}.", page) if second else None


def two_joined(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """Two sentences of one page in one."""
    page, one = _sentence(rng, pages)
    other = _of_page(rng, pages, page)
    if other == one:
        return None
    return f"{one.removesuffix('.')}, and {other[0].lower()}{other[1:]}", page


# --- false


def digit_changed(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    page, sentence = _sentence(rng, pages)
    at = [m.start() for m in re.finditer(r"\d", sentence)]
    if not at:
        return None
    i = rng.choice(at)
    changed = f"{sentence[:i]}{rng.choice([d for d in '123456789' if d != sentence[i]])}{sentence[i + 1 :]}"
    return (changed, page) if not _stands(changed, pages) else None


def number_of_the_page(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """A number in place of another that the page has elsewhere."""
    page, sentence = _sentence(rng, pages)
    text = next(p.text for p in pages if p.place.label == page)
    own = re.findall(r"\d+", sentence)
    others = [n for n in re.findall(r"\d+", re.sub(r"\[p\. \d+\]", "", text)) if n not in own]
    if not own or not others:
        return None
    changed = sentence.replace(rng.choice(own), rng.choice(others), 1)
    return (changed, page) if not _stands(changed, pages) else None


def amount_changed(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """The same digits with another sign, scale or unit."""
    page, sentence = _sentence(rng, pages)
    found = list(re.finditer(r"(?<= )[1-9]\d*(?= )", sentence))
    if not found:
        return None
    number = rng.choice(found)
    new = rng.choice(["-{}", "0.{}", "{} million", "{} billion", "{} mg", "{} %"]).format(number[0])
    changed = sentence[: number.start()] + new + sentence[number.end() :]
    return (changed, page) if not _stands(changed, pages) else None


def name_changed(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """A name in place of another, often one of the same page."""
    page, sentence = _sentence(rng, pages)
    own = re.findall(r"(?<=[a-z] )[A-Z][a-z]{3,}", sentence)
    text = next(p.text for p in pages if p.place.label == page)
    others = [n for n in re.findall(r"(?<=[a-z] )[A-Z][a-z]{3,}", text) if n not in sentence]
    if not own:
        return None
    new = rng.choice(others) if others and rng.random() < 0.7 else place_name(rng)
    changed = sentence.replace(rng.choice(own), new, 1)
    return (changed, page) if not _stands(changed, pages) else None


def foreign(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """A sentence of another report."""
    _, sentence = _sentence(rng, report_pages(rng))
    return (sentence, rng.choice(pages).place.label) if not _stands(sentence, pages) else None


def _false(make: Callable[[Random, tuple[Passage, ...]], tuple[str, str] | None]) -> Callable[..., Case | None]:
    return _case(make, "doubtful")


def _true(make: Callable[[Random, tuple[Passage, ...]], tuple[str, str] | None]) -> Callable[..., Case | None]:
    return _case(make, "confirmed")


def _case(
    make: Callable[[Random, tuple[Passage, ...]], tuple[str, str] | None], wanted: Wanted
) -> Callable[..., Case | None]:
    def case(kind: str, rng: Random, pages: tuple[Passage, ...]) -> Case | None:
        made = make(rng, pages)
        return Case(kind, pages, made[0], made[1], wanted, made[1] if wanted == "confirmed" else "") if made else None

    return case


def wrong_page(kind: str, rng: Random, pages: tuple[Passage, ...]) -> Case | None:
    """A true claim that cites another page, or one that is not there: it gets its own."""
    made = rng.choice([verbatim, shortened, reworded])(rng, pages)
    if made is None or len(pages) < 3:
        return None
    claim, right = made
    if _stands(claim, tuple(p for p in pages if p.place.label != right)):
        return None  # so short that two pages have it
    others = [p.place.label for p in pages if p.place.label != right] + [str(len(pages) + 7)]
    return Case(kind, pages, claim, rng.choice(others), "corrected", right)


def on_two_pages(kind: str, rng: Random, pages: tuple[Passage, ...]) -> Case | None:
    """A claim that stands on two pages and cites a third: nobody knows which was meant."""
    if len(pages) < 4:
        return None
    page, sentence = _sentence(rng, pages)
    rest = [i for i, p in enumerate(pages) if p.place.label != page]
    also, cited = rng.sample(rest, 2)
    changed = list(pages)
    changed[also] = Passage(pages[also].place, f"{pages[also].text.rstrip()} {sentence}\n")
    return Case(kind, tuple(changed), sentence, pages[cited].place.label, "doubtful", "")


KINDS: dict[str, Callable[[str, Random, tuple[Passage, ...]], Case | None]] = {
    "verbatim": _true(verbatim),
    "shortened": _true(shortened),
    "reworded": _true(reworded),
    "halves swapped": _true(swapped_order),
    "two sentences in one": _true(two_joined),
    "wrong page": wrong_page,
    "digit changed": _false(digit_changed),
    "another number of the page": _false(number_of_the_page),
    "sign, scale or unit changed": _false(amount_changed),
    "name changed": _false(name_changed),
    "of another report": _false(foreign),
    "on two pages, citing a third": on_two_pages,
}


def _sentence(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str]:
    """Page and sentence, which stands on that page alone."""
    while True:
        page = rng.choice(pages)
        sentence = _of_page(rng, pages, page.place.label)
        if sum(sentence in p.text for p in pages) == 1:
            return page.place.label, sentence


def _of_page(rng: Random, pages: tuple[Passage, ...], label: str) -> str:
    text = next(p.text for p in pages if p.place.label == label)
    body = [text[a:b] for a, b in sentences(text)]
    body = [s for s in body if s.endswith(".") and not s.startswith("#") and "\n" not in s]
    sentence = rng.choice(body or ["The page is empty."])
    return re.sub(r" \[p\. \d+\]", "", sentence)


def _stands(claim: str, pages: tuple[Passage, ...]) -> bool:
    """Whether a sentence of the report happens to have all words of the claim."""
    keys = {word.key for word in words(claim)}
    return any(keys <= unit.keys for page in pages for unit in page.units)
