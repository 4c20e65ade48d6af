"""Weights of the words of a text, and the words of a claim that a sentence must have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvcli.summarize.claim_words import Unit, Word, n_words, words

Kind = Literal["number", "name", "word"]

MOST_CAPITALS = 0.25  # share of words inside sentences; above it (German, titles) capitals do not indicate names
UNSEEN = 2.0  # weight of a word that no sentence has, often the model's own word: less than that of a rare word

# Factor on the weight of the rarest word. At 1 a false name passes with two true words after it; at 3 a true claim of
# four words after a new one is doubted if it leaves out a name.
IN_FRONT = 2.0


@dataclass(frozen=True)
class Wanted:
    """Requirements on a sentence for some words: all `musts`, and a share of the weights of the `others`."""

    musts: Mapping[str, float]
    others: Mapping[str, float]
    foreign: frozenset[str]  # names of the text that are not among the words
    in_front: float  # weight of a new capitalized word that begins the claim, if it may replace a foreign name

    def share(self, unit: Unit) -> float:
        """Return the share of the other words that the sentence has.

        Numbers and names are excluded, because their weight would confirm words that no sentence has.
        """
        stands_for_a_name = self.in_front > 0 and not self.foreign.isdisjoint(unit.keys)
        total = sum(self.others.values()) + (self.in_front - UNSEEN if stands_for_a_name else 0.0)
        return _inside(self.others, unit) / total if total > 0 else 1.0

    def overlap(self, unit: Unit) -> float:
        """Return the weight of all words that the sentence has."""
        return _inside(self.musts, unit) + _inside(self.others, unit)


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
        musts = {word.key for word in said if self.kind(word) != "word"}
        leads = self._capitals_name and any(w.leads and w.is_capital and not self.counts[w.key] for w in said)
        return Wanted(
            musts={key: weight for key, weight in weights.items() if key in musts},
            others={key: weight for key, weight in weights.items() if key not in musts},
            foreign=self._names - weights.keys() if leads else frozenset(),
            in_front=max(UNSEEN, IN_FRONT * math.log(1 + self.n)) if leads else 0.0,
        )

    def weight(self, key: str) -> float:
        """Return ln(1 + sentences / sentences with the key)."""
        return math.log(1 + self.n / self.counts[key]) if self.counts[key] else UNSEEN

    def kind(self, word: Word) -> Kind:
        if word.is_number:
            return "number"
        if not self._capitals_name or word.key in self._small:
            return "word"
        return "name" if word.stands_out or (word.leads and word.key in self._capital) else "word"

    @cached_property
    def _names(self) -> frozenset[str]:
        return self._capital - self._small

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
