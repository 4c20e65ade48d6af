"""Counting tasks: the common words of a list, and the frequent words of a coded text (RULER's cwe and fwe)."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from random import Random

from kvcli.demo import shuffled
from kvcli.quality.prose import distinct, name
from kvcli.quality.sample import Context, Question, SampleSeed, Task
from kvcli.quality.score import share_of_references

COMMON = 10  # number of words that are repeated most
REPEATS = {4096: (30, 3), 1024: (6, 1), 0: (3, 1)}  # by least length in tokens: repeats of common and of other words
ZIPF = 2.0  # the word of rank r is drawn with probability proportional to r ** -ZIPF


def _word(rng: Random) -> str:
    return name(rng).lower()


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _common_question(n: int) -> str:
    return f"What are the {n} most common words in the list above?"


def _common_prefix(n: int) -> str:
    return f"The {n} words that stand in the list most often are:"


def common(draw: SampleSeed, size: int) -> Context:
    """Write a solved example of few words, then the list."""
    rng = draw.rng()
    often, seldom = next(repeats for least, repeats in REPEATS.items() if draw.length >= least)
    example = distinct(rng, 6, _word)
    shown = _numbered(shuffled(rng, example[:2] * 3 + example[2:]))
    top = distinct(rng, COMMON, _word)
    rest = [_word(rng) for _ in range(size)]
    text = _numbered(shuffled(rng, top * often + [w for w in rest if w not in top] * seldom))
    solved = f"{shown}\n{_common_question(2)}\n{_common_prefix(2)} {', '.join(example[:2])}."
    asked = Question(_common_question(COMMON), _common_prefix(COMMON), tuple(top), f" {', '.join(top)}.")
    return Context(f"Example:\n{solved}\n\nNow the list.\n{text}", (asked,))


def frequent(draw: SampleSeed, size: int) -> Context:
    """Write coded words by Zipf's law; the first rank is noise, the question asks for the next three."""
    rng = draw.rng()
    words = distinct(rng, max(8, draw.length // 50), _word)
    reach = list(accumulate((rank + 1) ** -ZIPF for rank in range(len(words))))
    ranks = [bisect_left(reach, rng.random() * reach[-1]) for _ in range(size)]
    for rank in (1, 2, 3):  # so that the answer is right for every seed
        missing = max([ranks.count(r) for r in range(rank + 1, len(words))], default=0) + 1 - ranks.count(rank)
        ranks += [rank] * max(0, missing)
    said = shuffled(rng, ["..." if rank == 0 else words[rank] for rank in ranks])
    question = "Not counting the dots, what are the three words that appear most often in the coded text above?"
    prefix = "The three words that appear most often are:"
    asked = Question(question, prefix, tuple(words[1:4]), f" {', '.join(words[1:4])}.")
    return Context(f"A coded text: {' '.join(said)}", (asked,))


TASKS = (
    Task("cwe", "the ten common words of a list", common, share_of_references),
    Task("fwe", "the three frequent words of a coded text", frequent, share_of_references, least=12),
)
