"""Text to hide things in, and the names and numbers hidden: seeded, unlimited, in no tokenizer's favour.

The sentences are those of the demo's field reports, so that the bundled model can be measured too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

from kvcli.demo import words
from kvcli.demo.report import filler
from kvcli.errors import BadInput


class Prose:
    """Sentences without end: generated, or cut from the user's own text."""

    def __init__(self, haystack: str | None = None) -> None:
        found = re.split(r"(?<=[.!?])\s+|\n{2,}", haystack or "")
        self._own = [sentence for line in found if (sentence := " ".join(line.split()))]
        if haystack is not None and not self._own:
            raise BadInput("the haystack holds no text", code="empty_haystack", try_=["a text file with sentences"])

    def sentences(self, rng: Random, n: int) -> list[str]:
        """`n` of them; a longer list begins as a shorter one does."""
        if not self._own:
            return [filler(rng) for _ in range(n)]
        start = words.between(rng, 0, len(self._own) - 1)
        return [self._own[(start + i) % len(self._own)] for i in range(n)]


def name(rng: Random) -> str:
    """A pseudo-word of two or three syllables with a capital."""
    return words.place(rng)


def number(rng: Random) -> str:
    return words.digits(rng, 5)


def uuid(rng: Random) -> str:
    """32 hexadecimal digits in the usual groups."""
    digits = [words.pick(rng, "0123456789abcdef") for _ in range(32)]
    return "-".join("".join(digits[a:b]) for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))


def distinct(rng: Random, n: int, draw: Callable[[Random], str]) -> list[str]:
    """`n` different strings, none of which is the beginning of another."""
    found: list[str] = []
    while len(found) < n:
        new = draw(rng)
        if not any(new.startswith(old) or old.startswith(new) for old in found):
            found.append(new)
    return found


def hide(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> str:
    """One text: each needle stands where its share of the sentences is over; needles at one place keep their order."""
    out: list[str] = []
    waiting = sorted(needles, key=lambda pair: pair[0])
    for i in range(len(sentences) + 1):
        while waiting and round(waiting[0][0] * len(sentences)) <= i:
            out.append(waiting.pop(0)[1])
        out += sentences[i : i + 1]
    return " ".join(out)


def listed(items: Sequence[str]) -> str:
    """ "a, b and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + f" and {items[-1]}"
