"""Prompt lookup: drafts the tokens that followed an earlier match in the sequence, at almost no cost.

Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) copies from one match. SuffixDecoding (arXiv 2411.04975)
merges all matches into a tree by frequency. SAM-Decoding (arXiv 2411.10666) estimates acceptance by match length. Here
acceptance is estimated by match length and by how many matches agree, which predicts short matches better than length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcli.drafts.sources.suffix_index import SuffixIndex
from kvcli.drafts.tree.acceptance_rates import AcceptanceRates, by_bits
from kvcli.drafts.tree.tree import DraftCandidate

if TYPE_CHECKING:
    from kvcli.engine.drafting.report import AcceptanceByMatch

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


class PromptLookup:
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

    def safe(self, offer: DraftCandidate) -> int:
        """Return about two rows per matched token."""
        match: int = offer.about[3]
        return 2 * match + 1

    def learn(self, offer: DraftCandidate, was_right: bool) -> None:
        row, column, share, _ = offer.about
        self._odds.learn(row, column, was_right, share, is_first=column < 3)

    def record(self) -> tuple[AcceptanceByMatch, ...]:
        return self._odds.record()
