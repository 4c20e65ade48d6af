"""Claims about generated reports with what their citations are worth: what the checker is measured and tested with.

True claims are sentences of a page, word for word or put another way; false ones have a digit, a name, other words or
the page changed. The reports are those of `kvcli.demo.report`.
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
from kvcli.summarize.measures import measure
from kvcli.summarize.numbers import COUNTED, SCALES
from kvcli.summarize.words import STOP, sentences, words

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


FRAMES = ("It is reported that {}", "{}", "According to the report, {}", "The team notes: {}", "Engineers say that {}")


def reworded(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """Another frame, other endings, other typography."""
    page, sentence = _sentence(rng, pages)
    claim = re.sub(r"^The (\S+ of .+?) is (.+)\.$", r"\2 is given as the \1.", sentence)
    claim = re.sub(r"\b(\w{4,})ed\b", r"\1ing", claim, count=1)
    claim = claim.replace("-", "\N{NON-BREAKING HYPHEN}").replace("metres", "m").replace(" and ", " & ")
    return rng.choice(FRAMES).format(claim), page


def number_respelt(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """The same number in another spelling, touching its unit or not."""
    page, sentence = _sentence(rng, pages)
    if not (number := re.search(r"(?<= )([1-9]\d*)(?: metres)?(?= |\.\Z)", sentence)):
        return None
    n = int(number[1])
    ways = [f"{n}.0", f"{n},00", f"{n:,}", f"{n:,}".replace(",", "\u202f"), f"{n:,}".replace(",", " "), f"{n:,}.0"]
    ways += [word for word, counted in COUNTED.items() if counted == number[1]]
    unit = rng.choice([" m", "m", " meters", "-metre"]) if "metres" in number[0] else ""
    return f"{sentence[: number.start()]}{rng.choice(ways)}{unit}{sentence[number.end() :]}", page


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


AMOUNTS = (
    "-{}",
    "0.{}",
    ".{}",
    "{} 000",
    "{} million",
    "{} bn",
    "{}k",
    "{} mg",
    "{} cl",
    "{} %",
    "{} ppm",
    "${}",
    "{}⁶",
)


def amount_changed(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """The same digits with another sign, scale or unit."""
    page, sentence = _sentence(rng, pages)
    found = list(re.finditer(r"(?<= )[1-9]\d*(?= )", sentence))
    if not found:
        return None
    number = rng.choice(found)
    new = rng.choice(AMOUNTS).format(number[0])
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


def plain_changed(n: int) -> Callable[[Random, tuple[Passage, ...]], tuple[str, str] | None]:
    """So many words that are no numbers and no names in place of others, which come from another report."""

    def change(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
        page, sentence = _sentence(rng, pages)
        own = _plain_words(sentence)
        if len(own) < n:
            return None
        _, foreign = _sentence(rng, report_pages(rng))
        others = [word for word in _plain_words(foreign) if word not in own]
        if len(others) < n:
            return None
        for old, new in zip(rng.sample(own, n), rng.sample(others, n), strict=True):
            sentence = re.sub(rf"\b{old}\b", new, sentence, count=1)
        return (sentence, page) if not _stands(sentence, pages) else None

    return change


def name_in_front(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """Another name where the sentence begins with one: the text never has it."""
    page, sentence = _sentence(rng, pages)
    if not (found := re.match(r"[A-Z][a-z]+ [A-Z][a-z]+ (?=[a-z]+ed )", sentence)):
        return None
    changed = f"{place_name(rng)} {sentence[found.end() :]}"
    return (changed, page) if not _stands(changed, pages) else None


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


# Those of which every case must come out right
SURE: dict[str, Callable[[str, Random, tuple[Passage, ...]], Case | None]] = {
    "verbatim": _true(verbatim),
    "shortened": _true(shortened),
    "reworded": _true(reworded),
    "number in another spelling": _true(number_respelt),
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
# Those that a comparison of words finds in part: how many, the benchmark tells
PARTLY: dict[str, Callable[[str, Random, tuple[Passage, ...]], Case | None]] = {
    "one plain word changed": _false(plain_changed(1)),
    "two plain words changed": _false(plain_changed(2)),
    "three plain words changed": _false(plain_changed(3)),
    "an unknown name in front": _false(name_in_front),
}
KINDS = SURE | PARTLY


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


def _plain_words(sentence: str) -> list[str]:
    found = dict.fromkeys(re.findall(r"\b[a-z]{3,}\b", sentence))
    return [w for w in found if w not in STOP and w not in COUNTED and w not in SCALES and not measure(w)]


def _stands(claim: str, pages: tuple[Passage, ...]) -> bool:
    """Whether a sentence of the report happens to have all words of the claim."""
    keys = {word.key for word in words(claim)}
    return any(keys <= unit.keys for page in pages for unit in page.units)
