"""Prompt lookup: drafts the tokens that followed an earlier match in the sequence, at almost no cost.

Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) copies from one match. SuffixDecoding (arXiv 2411.04975)
merges all matches into a tree by frequency. SAM-Decoding (arXiv 2411.10666) estimates acceptance by match length. Here
acceptance is estimated by match length and by how many matches agree, which predicts short matches better than length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcli.drafts.tree.tree import AcceptanceRates, DraftCandidate, RatedSource, by_bits

# Find earlier occurrences of the end of a sequence.
#
# SAM-Decoding (arXiv 2411.10666) keeps a suffix automaton and SuffixDecoding (arXiv 2411.04975) a suffix tree; both
# find the longest match in amortised constant time. A sorted table of token pairs finds the same match: all earlier
# positions of the last two tokens are one range of an array, and numpy compares the range backwards at once. The table
# is built by one sort, takes 12 bytes a token where an automaton of Python dicts took 480, and holds every position
# rather than one per state. It removes dropped tokens by a filter, which an automaton cannot do.
# `tests/bench/ngram_index.py` measures it.


# A table entry is token, previous token, position in 19 + 19 + 25 bits. Wider ids collide; `_measured` removes the
# collisions because it compares the tokens themselves.
_ID_BITS, _POS_BITS = 19, 25
_ID_MASK, _POS_MASK = (1 << _ID_BITS) - 1, (1 << _POS_BITS) - 1

_FOLD = 4096  # newest tokens that are scanned and not yet sorted: scanning them costs about as much as one search
_CROWD = 4096  # newest positions of a pair that are compared; only pairs as common as a line break have more
_HERD = 512  # limit of compared positions from three matched tokens on


@dataclass(frozen=True, slots=True)
class Matches:
    """Earlier matches of the sequence's end: the longest match first, then the most recent."""

    ends: list[int]  # position of the last matched token
    lengths: list[int]  # tokens matched, at most the index's `longest`


class SuffixIndex:
    """Index of a growing token sequence that finds earlier matches of its end."""

    def __init__(self, shortest: int = 2, longest: int = 32) -> None:
        self.shortest = shortest  # minimum tokens of a match
        self.longest = longest  # tokens beyond which matches count as equally long
        self._back = longest - np.arange(longest)
        # -1 = no token before the sequence; grows by doubling
        self._padded = np.full(1024 + longest, -1, dtype=np.int32)
        self._n = 0
        self._table = np.empty(0, dtype=np.int64)  # [folded - 1] sorted entries
        self._folded = 0
        self._recent: dict[int, array[int]] = {}  # pair -> positions after the table, up to `_noted`
        self._noted = 0

    def __len__(self) -> int:
        return self._n

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self._padded.nbytes + self._table.nbytes

    @property
    def _text(self) -> NDArray[np.int32]:
        """Tokens of the sequence, [capacity]."""
        return self._padded[self.longest :]

    def shared(self, ids: Sequence[int]) -> int:
        """Return the length of the prefix that the sequence shares with `ids`."""
        n = min(len(ids), self._n)
        same = self._text[:n] == np.asarray(ids[:n], dtype=np.int32)
        return n if same.all() else int(same.argmin())

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens."""
        n = self._n + len(ids)
        if n > len(self._text):
            grown = np.full(max(n, 2 * len(self._text)) + self.longest, -1, dtype=np.int32)
            grown[: self._n + self.longest] = self._padded[: self._n + self.longest]
            self._padded = grown
        self._text[self._n : n] = ids
        self._n = n
        if n - self._folded >= _FOLD:
            self._fold()

    def truncate(self, n: int) -> None:
        """Remove the tokens from position `n` on."""
        self._n = min(n, self._n)
        if self._n < self._folded:
            self._table = self._table[(self._table & _POS_MASK) < self._n]
            self._folded = self._n
        self._recent, self._noted = {}, 0

    def tail(self, n: int) -> list[int]:
        """Return the last `n` tokens."""
        return list(self._text[max(0, self._n - n) : self._n].tolist())

    def find(self, limit: int = 16, path: Sequence[int] = ()) -> Matches:
        """Return up to `limit` earlier positions where at least `shortest` tokens match the end of the sequence
        extended by `path`."""
        if self._n < 2:
            return Matches([], [])
        ours = self._padded[self._n : self._n + self.longest]  # the last tokens of the sequence
        if path:
            ours = np.concatenate([ours, np.asarray(path, dtype=np.int32)])[-self.longest :]
        ours = ours[::-1]
        previous, token = [*self.tail(2), *path][-2:]
        ends, known = self._of_pair(previous, token), 2
        if not len(ends) and self.shortest == 1:
            ends, known = np.flatnonzero(self._text[: self._n - 1] == token), 1
        shorter = ends
        while len(ends) > limit and known < self.longest:
            shorter = ends[-(_CROWD if known < 3 else _HERD) :]
            before = shorter[shorter >= known]
            ends = before[self._text[before - known] == ours[known]]
            known += 1
        spare = limit - len(ends)
        if spare <= 0:
            ends = ends[-limit:]
        elif shorter is not ends:
            # the newest shorter matches fill the list up: one of them may be right where the longest match is not
            ends = np.array(sorted({*ends.tolist(), *shorter[-spare:].tolist()}))
        return self._measured(ends, ours)

    def following(self, ends: Sequence[int], n: int) -> list[list[int]]:
        """Return the `n` tokens after each position but the last; at the end of the sequence the tail repeats."""
        at = np.asarray(ends, dtype=np.int64)[:, None]  # [places, 1]
        return list(self._text[at + 1 + np.arange(n) % (self._n - 1 - at)].tolist())

    def _of_pair(self, previous: int, token: int) -> NDArray[np.int64]:
        """Return the positions before the last one that end this pair of tokens, ascending."""
        self._note()
        ends = np.array(self._recent.get(previous << 32 | token, ()), dtype=np.int64)
        if self._folded:
            low = ((token & _ID_MASK) << (_ID_BITS + _POS_BITS)) | ((previous & _ID_MASK) << _POS_BITS)
            start, stop = self._table.searchsorted([low, low + _POS_MASK])
            ends = np.concatenate([self._table[start:stop] & _POS_MASK, ends])
        return ends[:-1] if len(ends) and ends[-1] == self._n - 1 else ends

    def _note(self) -> None:
        """Record the pairs at positions after the table."""
        first = max(self._noted, self._folded, 1)
        text: list[int] = self._text[first - 1 : self._n].tolist()
        for at, (previous, token) in enumerate(pairwise(text), start=first):
            self._recent.setdefault(previous << 32 | token, array("q")).append(at)
        self._noted = self._n

    def _measured(self, ends: NDArray[np.int64], ours: NDArray[np.int32]) -> Matches:
        """Return these positions with their match lengths, best first, without those that are too short. `ours`: the
        last tokens, the last one first."""
        differs = np.empty((len(ends), self.longest + 1), dtype=np.bool_)
        differs[:, -1] = True
        np.not_equal(self._padded[ends[:, None] + self._back], ours, out=differs[:, :-1])
        lengths: list[int] = differs.argmax(axis=1).tolist()
        found = [(n, end) for n, end in zip(lengths, ends.tolist(), strict=True) if n >= self.shortest]
        found.sort(reverse=True)
        return Matches([end for _, end in found], [n for n, _ in found])

    def _fold(self) -> None:
        """Sort the scanned tokens into the table."""
        at = np.arange(max(self._folded, 1), self._n)
        token, previous = (self._text[end].astype(np.int64) & _ID_MASK for end in (at, at - 1))
        fresh = np.sort((token << (_ID_BITS + _POS_BITS)) | (previous << _POS_BITS) | at)
        self._table = np.insert(self._table, np.searchsorted(self._table, fresh), fresh)
        self._folded = self._n
        self._recent, self._noted = {}, 0


_PLACES = 16  # earlier matches merged into one tree; 32 gained nothing on replayed code and docs
_SHORTER = 0.25  # weight factor of a match per token that it is shorter than the longest
# Rows: matches of 1, 2-3, 4-7, 8-15, 16-31, 32+ tokens. Columns: the first choice of 1, of 2, of 3 or more matches, and
# any later choice. Later choices have their own column because the best of several shares is partly luck. The values
# are from replayed Python files and Markdown docs, rounded down.
_START = (
    (0.3, 0.5, 0.7, 0.5),
    (0.5, 0.75, 0.9, 0.6),
    (0.65, 0.8, 0.9, 0.6),
    (0.75, 0.85, 0.9, 0.6),
    (0.85, 0.9, 0.95, 0.6),
    (0.9, 0.95, 0.95, 0.6),
)
_NAMES = ("1", "2-3", "4-7", "8-15", "16-31", "32+")


TOKEN_BYTES = 24  # index bytes per token: the sequence, the positions, and their sorting


class PromptLookup(RatedSource):
    """Prompt lookup over the index of one sequence, with the acceptance rates of its draft tokens."""

    name = "prompt-lookup"

    def __init__(self, min_match: int, max_match: int) -> None:
        self.index = SuffixIndex(min_match, max_match)
        self._odds = AcceptanceRates(_START, _NAMES)
        self._ahead: list[list[int]] = []  # [matches][depth] tokens that followed each match of the sequence's end
        self._lengths: list[int] = []  # [matches] match lengths, longest first
        self._weight: list[float] = []

    def start(self, ids: Sequence[int]) -> None:
        self.index.truncate(self.index.shared(ids))
        self.index.extend(ids[len(self.index) :])

    def extend(self, ids: Sequence[int]) -> None:
        self.index.extend(ids)

    def root(self, depth: int) -> Any:
        """Return the matches of the sequence's end: a state of this source is the matches that agree so far."""
        self._ahead, self._lengths, self._weight = [], [], []
        return self.behind((), depth)

    def behind(self, path: Sequence[int], depth: int) -> Any:
        """Return the state of a sequence extended by `path`."""
        found = self.index.find(_PLACES, path)
        if not found.ends:
            return None
        first, n = len(self._ahead), len(path)
        self._ahead += [[*path, *ahead] for ahead in self.index.following(found.ends, depth - n)]
        self._lengths += [length - n for length in found.lengths]
        self._weight += [_SHORTER ** (found.lengths[0] - length) for length in found.lengths]
        return range(first, len(self._ahead))

    def offers(self, state: Any, depth: int, branches: int) -> Sequence[DraftCandidate]:
        if len(state) == 1:  # most nodes of a tree have a single match
            (place,) = state
            match = self._lengths[place] + depth
            row = by_bits(match, len(_START) - 1)
            return [DraftCandidate(self._ahead[place][depth], self._odds.chance(row, 0), state, (row, 0, 1.0, match))]
        named: dict[int, list[int]] = {}
        weights: dict[int, float] = {}
        for place in state:
            token = self._ahead[place][depth]
            named.setdefault(token, []).append(place)
            weights[token] = weights.get(token, 0.0) + self._weight[place]
        total = sum(weights.values())
        found = []
        for rank, token in enumerate(sorted(weights, key=weights.__getitem__, reverse=True)[:branches]):
            agree, share = named[token], weights[token] / total
            match = self._lengths[agree[0]] + depth  # matches are sorted, longest first
            row, column = by_bits(match, len(_START) - 1), 3 if rank else min(len(agree), 3) - 1
            chance = share * self._odds.chance(row, column)
            found.append(DraftCandidate(token, chance, agree, (row, column, share, match)))
        return found

    def safe(self, candidate: DraftCandidate) -> int:
        """Return about two rows per matched token."""
        match: int = candidate.about[3]
        return 2 * match + 1

    def learn(self, candidate: DraftCandidate, was_right: bool) -> None:
        row, column, share, _ = candidate.about
        self._odds.learn(row, column, was_right, share, is_first=column < 3)
