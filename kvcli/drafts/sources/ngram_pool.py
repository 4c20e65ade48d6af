"""The pool of n-grams that lookahead rows produce: the last tokens of a sequence -> n-grams that may follow.

Lookahead Decoding (Fu et al., arXiv 2402.02057) keys by the last token, FAFO (Le et al., ICML 2026) by up to three.
Here every length up to `key_max` is a key, and the longest key is looked up first. Within a key the newest n-gram comes
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcli.drafts.tree.tree import AcceptanceRates, DraftCandidate, RatedSource

KEYS = 1 << 14  # maximum; the oldest keys are evicted first
KEY_BYTES = 520  # bytes of a key and its n-grams as Python objects; measured with tracemalloc
# Rows: keys of 1, 2, 3, 4 tokens and more. Columns: the first choice, a later one.
_START = ((0.3, 0.1), (0.45, 0.15), (0.6, 0.2), (0.7, 0.25))
_NAMES = ("1", "2", "3", "4+")

Run = tuple[int, ...]


class NgramPool(RatedSource):
    """Pool of n-grams by key, and their acceptance rates."""

    name = "lookahead"

    def __init__(self, key_max: int, per_key: int, max_ngrams: int, seeds: int = 0) -> None:
        """`seeds`: length of the n-grams taken from the sequence itself, as in FAFO's release; 0 = none."""
        self.key_max, self.per_key, self.max_ngrams, self._seeds = key_max, per_key, max_ngrams, seeds
        self._runs: dict[Run, dict[Run, None]] = {}  # key -> n-grams, oldest first
        # the last tokens of the sequence: `key_max`, or the length of a seed if that is more
        self._tail: list[int] = []
        self._odds = AcceptanceRates(_START, _NAMES)

    def __len__(self) -> int:
        return len(self._runs)

    def put(self, before: Sequence[int], run: Sequence[int]) -> None:
        """Add the n-gram `run`, which may follow a sequence that ends with `before`."""
        value = tuple(run)
        for n in range(1, min(self.key_max, len(before)) + 1):
            key = tuple(before[-n:])
            runs = self._runs.pop(key, None) or {}
            runs.pop(value, None)
            runs[value] = None  # newest last
            if len(runs) > self.per_key:
                del runs[next(iter(runs))]
            self._runs[key] = runs
        while len(self._runs) > KEYS:
            del self._runs[next(iter(self._runs))]

    def start(self, ids: Sequence[int]) -> None:
        """Start a sequence. N-grams of earlier ones are kept, because a wrong draft token costs only a row."""
        self._tail = []
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        text = [*self._tail, *ids]
        if n := self._seeds:
            for end in range(max(n, len(self._tail) + 1), len(text) + 1):
                self.put(text[end - n : end - n + 1], text[end - n + 1 : end])  # keyed by one token, as in FAFO
        self._tail = text[-max(self.key_max, n) :]

    def root(self, depth: int) -> Any:
        """Return the (n-gram, key length) pairs that match the end of the sequence: a state of this source."""
        found: dict[Run, int] = {}
        for n in range(min(self.key_max, len(self._tail)), 0, -1):
            for run in reversed(self._runs.get(tuple(self._tail[-n:]), {})):
                found.setdefault(run, n)
                if len(found) == self.max_ngrams:
                    return list(found.items())
        return list(found.items()) or None

    def offers(self, state: Any, depth: int, branches: int) -> Sequence[DraftCandidate]:
        named: dict[int, list[tuple[Run, int]]] = {}
        for run, n in state:
            if depth < len(run):
                named.setdefault(run[depth], []).append((run, n))
        found = []
        for rank, (token, agree) in enumerate(list(named.items())[:branches]):
            row, column = min(agree[0][1], len(_START)) - 1, int(rank > 0)
            found.append(DraftCandidate(token, self._odds.chance(row, column), agree, (row, column)))
        return found
