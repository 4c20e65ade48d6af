"""Weights of the words of a text, the words of a claim that a sentence must have, and those that replace its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from kvcli.summarize.claim_words import Unit, Word, n_words, words

MOST_CAPITALS = 0.25  # share of words inside sentences; above it (German, titles) capitals do not indicate names
UNSEEN = 2.0  # weight of a word that no sentence has, often the model's own word: less than that of a rare word

# Factor on the weight of a word of the text that stands where the sentence has another. A new word there may be a
# synonym, and counts as any other.
INSTEAD = 4.0


@dataclass(frozen=True)
class Wanted:
    """Requirements on a sentence for some words: all `musts`, and a share of the weights of the `others`."""

    said: Sequence[Word]
    musts: Mapping[str, float]
    others: Mapping[str, float]
    names: frozenset[str]  # names of the text
    known: frozenset[str]  # words that some sentence of the text has

    def has_enough(self, unit: Unit, enough: float) -> bool:
        """True if the sentence has this share of the other words. A known word in place of its own weighs more.

        Numbers and names are excluded, because their weight would confirm words that no sentence has. No share is
        enough if a word with a capital letter stands where the sentence has a name.
        """
        had = _inside(self.others, unit)
        if had == self._every or had < enough * self._every:  # words in place of its own can only lower the share
            return had == self._every
        replaced = replaced_by(self.said, unit)
        capitals = {word.key for word in self.said if word.is_capital}
        if any(key in capitals and not gone.isdisjoint(self.names) for key, gone in replaced.items()):
            return False
        worse = replaced.keys() & self.known
        absent = self.others.keys() - unit.keys
        lost = sum(self.others[key] * (INSTEAD if key in worse else 1.0) for key in absent)
        return had >= enough * (had + lost)

    @cached_property
    def _every(self) -> float:
        return sum(self.others.values())

    def overlap(self, unit: Unit) -> float:
        """Return the weight of all words that the sentence has."""
        return _inside(self.musts, unit) + _inside(self.others, unit)


def replaced_by(said: Sequence[Word], unit: Unit) -> dict[str, set[str]]:
    """Return the words that stand where the sentence has others, and those others.

    Words without a match replace the words between the matches of their neighbours, if none of these is in the claim
    and they are at most one more than the words themselves. At either end of the claim one neighbour is enough.
    """
    keys = [[word.key for word in at_one_place] for _, at_one_place in groupby(said, key=lambda word: word.start)]
    found = [[i for key in one for i in unit.spots.get(key, ())] for one in keys]
    matched = {i for spots in found for i in spots}
    last = max((i for spots in unit.spots.values() for i in spots), default=-1)
    replaced: dict[str, set[str]] = {}
    for is_absent, group in groupby(range(len(keys)), key=lambda i: not found[i]):
        run = list(group)
        if not is_absent:
            continue
        lefts = found[run[0] - 1] if run[0] else None
        rights = found[run[-1] + 1] if run[-1] + 1 < len(keys) else None
        if lefts is not None and rights is not None:
            gaps = [(a + 1, b) for a in lefts for b in rights if a + 1 < b <= a + len(run) + 2]
        else:
            gaps = [(b - 1, b) for b in rights or () if b > 0] + [(a + 1, a + 2) for a in lefts or () if a < last]
        free = next((set(range(*gap)) for gap in gaps if matched.isdisjoint(range(*gap))), None)
        if free is not None:
            gone = {key for key, spots in unit.spots.items() if not free.isdisjoint(spots)}
            replaced |= {key: gone for i in run for key in keys[i]}
    return replaced


@dataclass(frozen=True)
class Lexicon:
    """Words of a text with weights: words in few sentences weigh most."""

    texts: tuple[str, ...]
    counts: Counter[str]  # key -> number of sentences
    n: int  # number of sentences

    @classmethod
    def of(cls, texts: Sequence[str], sentences: Iterable[Unit]) -> Lexicon:
        all_units = list(sentences)
        return cls(tuple(texts), Counter(key for unit in all_units for key in unit.keys), len(all_units))

    def wanted(self, said: Sequence[Word]) -> Wanted:
        weights = {word.key: self.weight(word.key) for word in said}
        musts = {word.key for word in said if self.is_must(word)}
        return Wanted(
            said,
            musts={key: weight for key, weight in weights.items() if key in musts},
            others={key: weight for key, weight in weights.items() if key not in musts},
            names=self._names,
            known=frozenset(key for key in weights if self.counts[key]),
        )

    def weight(self, key: str) -> float:
        """Return ln(1 + sentences / sentences with the key)."""
        return math.log(1 + self.n / self.counts[key]) if self.counts[key] else UNSEEN

    def is_must(self, word: Word) -> bool:
        """True for numbers and names."""
        is_name = self._capitals_name and word.key not in self._small
        return word.is_number or (is_name and (word.stands_out or (word.leads and word.key in self._capital)))

    @cached_property
    def _names(self) -> frozenset[str]:
        return self._capital - self._small if self._capitals_name else frozenset()

    @cached_property
    def _capital(self) -> frozenset[str]:
        """Words with a capital letter inside a sentence."""
        return frozenset(word.key for word in self._words if word.stands_out)

    @cached_property
    def _small(self) -> frozenset[str]:
        """Words that also occur without a capital letter, so they are no names."""
        return frozenset(w.key for w in self._words if not w.is_capital and not w.leads and not w.is_number)

    @cached_property
    def _capitals_name(self) -> bool:
        n = sum(n_words(text) for text in self.texts)
        return sum(word.stands_out for word in self._words) <= MOST_CAPITALS * n

    @cached_property
    def _words(self) -> list[Word]:
        return [word for text in self.texts for word in words(text)]


def _inside(weights: Mapping[str, float], unit: Unit) -> float:
    return sum(weight for key, weight in weights.items() if key in unit.keys)
