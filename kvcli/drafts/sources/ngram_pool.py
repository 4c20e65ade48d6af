"""The pool of n-grams that scouts harvest: short keys of the text so far -> runs of tokens that may follow.

Lookahead Decoding (Fu et al., arXiv 2402.02057) keys by the last token, FAFO (Le et al., ICML 2026) by up to three;
here every length up to `key_max` is a key and the longest is looked up first. Within a key the newest run comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcli.drafts.tree.acceptance_rates import AcceptanceRates
from kvcli.drafts.tree.tree import DraftCandidate

if TYPE_CHECKING:
    from kvcli.engine.drafting.report import AcceptanceByMatch

KEYS = 1 << 14  # at most; the oldest go first
KEY_BYTES = 520  # of a key and its runs, as Python holds them; measured with tracemalloc
# Rows: keys of 1, 2, 3, 4 tokens and more. Columns: the first choice, a later one.
_START = ((0.3, 0.1), (0.45, 0.15), (0.6, 0.2), (0.7, 0.25))
_NAMES = ("1", "2", "3", "4+")

Run = tuple[int, ...]


class NgramPool:
    """n-grams by key, and the record of how they fared."""

    name = "lookahead"

    def __init__(self, key_max: int, per_key: int, guesses: int, seeds: int = 0) -> None:
        """`seeds`: tokens of the n-grams that the text itself gives it, as in FAFO's release; 0 = none."""
        self.key_max, self.per_key, self.guesses, self._seeds = key_max, per_key, guesses, seeds
        self._runs: dict[Run, dict[Run, None]] = {}  # key -> runs, oldest first
        self._tail: list[int] = []  # the last tokens of the text: `key_max`, or as many as a seed has
        self._odds = AcceptanceRates(_START, _NAMES)

    def __len__(self) -> int:
        return len(self._runs)

    def put(self, before: Sequence[int], run: Sequence[int]) -> None:
        """`run` may follow a text that ends with `before`."""
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
        """What was harvested under another text stays: a wrong guess costs a row, not the text."""
        self._tail = []
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        text = [*self._tail, *ids]
        if n := self._seeds:
            for end in range(max(n, len(self._tail) + 1), len(text) + 1):
                self.put(text[end - n : end - n + 1], text[end - n + 1 : end])  # by one token, as there
        self._tail = text[-max(self.key_max, n) :]

    def root(self, depth: int) -> Any:
        """A state is the (run, key length) pairs that agree so far."""
        found: dict[Run, int] = {}
        for n in range(min(self.key_max, len(self._tail)), 0, -1):
            for run in reversed(self._runs.get(tuple(self._tail[-n:]), {})):
                found.setdefault(run, n)
                if len(found) == self.guesses:
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

    def safe(self, offer: DraftCandidate) -> int:
        """One run of the usual length."""
        return 4

    def learn(self, offer: DraftCandidate, was_right: bool) -> None:
        row, column = offer.about
        self._odds.learn(row, column, was_right, is_first=not column)

    def record(self) -> tuple[AcceptanceByMatch, ...]:
        return self._odds.record()
