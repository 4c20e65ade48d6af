"""Claims made of the sentences of generated reports, those of `kvcli.demo.report`: true ones and false ones.

Each takes pages and gives a claim with the label of the page it cites, or nothing where the sentence it drew cannot be
changed so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from kvcli.demo import place as place_name
from kvcli.demo.report import write_report
from kvcli.summarize.check import Passage
from kvcli.summarize.citations import Place
from kvcli.summarize.claim_words import STOP, sentences, words
from kvcli.summarize.numbers import COUNTED, SCALES
from kvcli.summarize.units import measure

Make = Callable[[Random, tuple[Passage, ...]], tuple[str, str] | None]


def report_pages(rng: Random) -> tuple[Passage, ...]:
    """The pages of a new report, without marks."""
    report = write_report(rng, 1_500 + 2_500 * rng.random(), 0.4)
    found = re.split(r"^\[p\. \d+\]\n", report.text, flags=re.MULTILINE)[1:]
    return tuple(Passage(Place("page", str(i)), text) for i, text in enumerate(found, 1) if text.strip())


# --- true, and on the page cited


def verbatim(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    page, sentence = drawn(rng, pages)
    return sentence, page


def shortened(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """Without its last words, or without its adjectives."""
    page, sentence = drawn(rng, pages)
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
    page, sentence = drawn(rng, pages)
    claim = re.sub(r"^The (\S+ of .+?) is (.+)\.$", r"\2 is given as the \1.", sentence)
    claim = re.sub(r"\b(\w{4,})ed\b", r"\1ing", claim, count=1)
    claim = claim.replace("-", "\N{NON-BREAKING HYPHEN}").replace("metres", "m").replace(" and ", " & ")
    return rng.choice(FRAMES).format(claim), page


def number_respelt(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """The same number in another spelling, touching its unit or not."""
    page, sentence = drawn(rng, pages)
    if not (number := re.search(r"(?<= )([1-9]\d*)(?: metres)?(?= |\.\Z)", sentence)):
        return None
    n = int(number[1])
    ways = [f"{n}.0", f"{n},00", f"{n:,}", f"{n:,}".replace(",", "\u202f"), f"{n:,}".replace(",", " "), f"{n:,}.0"]
    ways += [word for word, counted in COUNTED.items() if counted == number[1]]
    unit = rng.choice([" m", "m", " meters", "-metre"]) if "metres" in number[0] else ""
    return f"{sentence[: number.start()]}{rng.choice(ways)}{unit}{sentence[number.end() :]}", page


def swapped_order(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """The second half first."""
    page, sentence = drawn(rng, pages)
    first, joint, second = sentence.removesuffix(".").partition(rng.choice([" while ", " because ", ", "]))
    return (f"{second[0].upper()}{second[1:]}{joint.rstrip()} {first}.", page) if second else None


def two_joined(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """Two sentences of one page in one."""
    page, one = drawn(rng, pages)
    other = _of_page(rng, pages, page)
    if other == one:
        return None
    return f"{one.removesuffix('.')}, and {other[0].lower()}{other[1:]}", page


# --- false


def digit_changed(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    page, sentence = drawn(rng, pages)
    at = [m.start() for m in re.finditer(r"\d", sentence)]
    if not at:
        return None
    i = rng.choice(at)
    changed = f"{sentence[:i]}{rng.choice([d for d in '123456789' if d != sentence[i]])}{sentence[i + 1 :]}"
    return (changed, page) if not stands(changed, pages) else None


def number_of_the_page(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """A number in place of another that the page has elsewhere."""
    page, sentence = drawn(rng, pages)
    text = next(p.text for p in pages if p.place.label == page)
    own = re.findall(r"\d+", sentence)
    others = [n for n in re.findall(r"\d+", re.sub(r"\[p\. \d+\]", "", text)) if n not in own]
    if not own or not others:
        return None
    changed = sentence.replace(rng.choice(own), rng.choice(others), 1)
    return (changed, page) if not stands(changed, pages) else None


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
    page, sentence = drawn(rng, pages)
    found = list(re.finditer(r"(?<= )[1-9]\d*(?= )", sentence))
    if not found:
        return None
    number = rng.choice(found)
    new = rng.choice(AMOUNTS).format(number[0])
    changed = sentence[: number.start()] + new + sentence[number.end() :]
    return (changed, page) if not stands(changed, pages) else None


def name_changed(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """A name in place of another, often one of the same page."""
    page, sentence = drawn(rng, pages)
    own = re.findall(r"(?<=[a-z] )[A-Z][a-z]{3,}", sentence)
    text = next(p.text for p in pages if p.place.label == page)
    others = [n for n in re.findall(r"(?<=[a-z] )[A-Z][a-z]{3,}", text) if n not in sentence]
    if not own:
        return None
    new = rng.choice(others) if others and rng.random() < 0.7 else place_name(rng)
    changed = sentence.replace(rng.choice(own), new, 1)
    return (changed, page) if not stands(changed, pages) else None


def foreign(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """A sentence of another report."""
    _, sentence = drawn(rng, report_pages(rng))
    return (sentence, rng.choice(pages).place.label) if not stands(sentence, pages) else None


def plain_changed(n: int) -> Make:
    """So many words that are no numbers and no names in place of others, which come from another report."""

    def change(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
        page, sentence = drawn(rng, pages)
        _, foreign = drawn(rng, report_pages(rng))
        changed = change_words(rng, sentence, n, foreign)
        return (changed, page) if changed and not stands(changed, pages) else None

    return change


def change_words(rng: Random, claim: str, n: int, text: str) -> str:
    """The claim with so many of its plain words in place of others of a text; "" where it has too few."""
    own = _plain_words(claim)
    others = [word for word in _plain_words(text) if word not in own]
    if len(own) < n or len(others) < n:
        return ""
    for old, new in zip(rng.sample(own, n), rng.sample(others, n), strict=True):
        claim = re.sub(rf"\b{old}\b", new, claim, count=1)
    return claim


def name_in_front(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str] | None:
    """Another name where the sentence begins with one: the text never has it."""
    page, sentence = drawn(rng, pages)
    if not (found := re.match(r"[A-Z][a-z]+ [A-Z][a-z]+ (?=[a-z]+ed )", sentence)):
        return None
    changed = f"{place_name(rng)} {sentence[found.end() :]}"
    return (changed, page) if not stands(changed, pages) else None


def drawn(rng: Random, pages: tuple[Passage, ...]) -> tuple[str, str]:
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


def stands(claim: str, pages: tuple[Passage, ...]) -> bool:
    """Whether a sentence of the report happens to have all words of the claim."""
    keys = {word.key for word in words(claim)}
    return any(keys <= unit.keys for page in pages for unit in page.units)
