"""Prose in which facts are hidden, and the hidden names and numbers: seeded, unlimited, without tokenizer bias.

The sentences are those of the demo's field reports, so that the bundled model can be measured, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

from kvcli import demo
from kvcli.demo.report import filler
from kvcli.errors import BadInput


class Prose:
    """Unlimited source of sentences: generated, or split from the user's text."""

    def __init__(self, haystack: str | None = None) -> None:
        found = re.split(r"(?<=[.!?])\s+|\n{2,}", haystack or "")
        self._own = [sentence for line in found if (sentence := " ".join(line.split()))]
        if haystack is not None and not self._own:
            raise BadInput("the haystack holds no text", code="empty_haystack", try_=["a text file with sentences"])

    def sentences(self, rng: Random, n: int) -> list[str]:
        """Return `n` sentences; a longer list begins with the sentences of a shorter one."""
        if not self._own:
            return [filler(rng) for _ in range(n)]
        start = demo.between(rng, 0, len(self._own) - 1)
        return [self._own[(start + i) % len(self._own)] for i in range(n)]


def name(rng: Random) -> str:
    """Return a capitalized pseudo-word of two or three syllables."""
    return demo.place(rng)


def number(rng: Random) -> str:
    return demo.digits(rng, 5)


def uuid(rng: Random) -> str:
    """Return 32 hexadecimal digits in the usual groups."""
    digits = [demo.pick(rng, "0123456789abcdef") for _ in range(32)]
    return "-".join("".join(digits[a:b]) for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))


def distinct(rng: Random, n: int, draw: Callable[[Random], str]) -> list[str]:
    """Draw `n` different strings, none of which is a prefix of another."""
    found: list[str] = []
    while len(found) < n:
        new = draw(rng)
        if not any(new.startswith(old) or old.startswith(new) for old in found):
            found.append(new)
    return found


def hide(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> str:
    """Insert each needle after its share of the sentences and join all; needles at the same place keep their order."""
    out: list[str] = []
    waiting = sorted(needles, key=lambda pair: pair[0])
    for i in range(len(sentences) + 1):
        while waiting and round(waiting[0][0] * len(sentences)) <= i:
            out.append(waiting.pop(0)[1])
        out += sentences[i : i + 1]
    return " ".join(out)


def listed(items: Sequence[str]) -> str:
    """Join items as "a, b and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + f" and {items[-1]}"
