"""One draft tree from several sources. It holds the likeliest tokens, and each shared prefix once.

Merging retrieval and logits in one tree follows RACER (arXiv 2604.14885); best-first admission under a budget of rows
follows SuffixDecoding (arXiv 2411.04975). A token that two sources propose at one node costs one row, and both sources
expand it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple, Protocol

from kvcli.engine.stats import AcceptanceByMatch

FAINT = 0.02  # chance of acceptance below which a token is not added to the tree (with `spec.adaptive`)
_LIKELY = 0.2  # chance of acceptance above which a source of `grow(beyond=)` may be started after a draft token
SURE = 0.8  # if the best candidate of a source has this chance, dearer sources are not asked at that place


# starts a source after a path of draft tokens, with the maximum depth: its state, or None if it has no candidates
Beyond = Callable[[Sequence[int], int], Any]


# a NamedTuple: dozens are made each pass, and making a frozen dataclass takes four times as long
class DraftCandidate(NamedTuple):
    """A token that one source proposes at one node of the draft tree."""

    id: int
    chance: float  # chance that the token is accepted, given that all tokens before it were
    state: Any  # state of the source after this token
    about: Any  # data of the source, which it gets back in `learn`


class DraftSource(Protocol):
    """Draft source: proposes draft tokens, and learns how often they are accepted.

    Call order: `start`, then in each pass `root`, `offers` at each node that the tree expands, `learn` for each
    candidate, verified or not, whose parent was accepted, and `extend`. A state is read only by the source that made
    it."""

    name: str

    def start(self, ids: Sequence[int]) -> None:
        """Set the committed sequence to `ids`; data of the shared prefix may be kept."""

    def extend(self, ids: Sequence[int]) -> None:
        """Append `ids` to the sequence."""

    def root(self, depth: int) -> Any:
        """Return the state at the sequence's end; None = no candidates. No path will be deeper than `depth`."""

    def offers(self, state: Any, depth: int, branches: int) -> Sequence[DraftCandidate]:
        """Return at most `branches` different tokens after `state`, `depth` tokens after the sequence's end."""

    def safe(self, candidate: DraftCandidate) -> int:
        """Return how many rows a tree that begins with this candidate may have before their cost is measured."""
        return 4

    def learn(self, candidate: DraftCandidate, was_right: bool) -> None:
        """Record whether this candidate, whose parent was accepted, is the token that follows."""

    def record(self) -> tuple[AcceptanceByMatch, ...]:
        """Return the acceptance rates of first choices since the start, by classes that the source defines."""


class RatedSource(DraftSource):
    """Draft source whose candidates say where their rate is in `_odds`: `about` is the row and the column."""

    _odds: AcceptanceRates

    def learn(self, candidate: DraftCandidate, was_right: bool) -> None:
        row, column = candidate.about
        self._odds.learn(row, column, was_right, is_first=not column)

    def record(self) -> tuple[AcceptanceByMatch, ...]:
        return self._odds.record()


class DraftToken(NamedTuple):
    """Draft token: one row that may be verified."""

    id: int
    parent: int  # index among the draft tokens; -1 = the sequence's end
    chance: float  # chance that the token and all its ancestors are accepted
    candidates: tuple[tuple[int, DraftCandidate], ...]  # by source that proposed the token: its index, its candidate


def grow(
    sources: Sequence[DraftSource],
    most: int,
    room: int,
    branches: int,
    min_chance: float = FAINT,
    beyond: Sequence[tuple[int, Beyond]] = (),
) -> list[DraftToken]:
    """Return up to `most` draft tokens, the likeliest first, none deeper than `room`; a parent comes before its
    children.

    `beyond`: (index of a source, function); where no source has a token after a path, it starts this source there.
    """
    if most < 1 or room < 1:
        return []
    deepest = min(most, room)
    draft_tokens: list[DraftToken] = []
    # makes entries unequal, so that the heap never compares draft tokens; equal chances are ordered by age
    order = count()
    heap: list[tuple[float, int, DraftToken, int]] = []

    def push(parent: int, chance: float, depth: int, states: Sequence[tuple[int, Any]]) -> None:
        """Push the candidates below `parent` on the heap."""
        for share, candidates in _merged(sources, states, depth, branches):
            if (p := chance * share) >= min_chance:
                heappush(heap, (-p, next(order), DraftToken(candidates[0][1].id, parent, p, candidates), depth + 1))

    roots = [(i, source.root(deepest)) for i, source in enumerate(sources)]
    push(-1, 1.0, 0, [(i, state) for i, state in roots if state is not None])
    while heap and len(draft_tokens) < most:
        _, _, token, depth = heappop(heap)
        draft_tokens.append(token)
        if depth < deepest and len(draft_tokens) < most:
            states = [(i, candidate.state) for i, candidate in token.candidates if candidate.state is not None]
            if not states and beyond and token.chance >= _LIKELY:
                path = _path(draft_tokens)
                states = [(i, state) for i, start in beyond if (state := start(path, deepest)) is not None]
            push(len(draft_tokens) - 1, token.chance, depth, states)
    return draft_tokens


def _path(draft_tokens: Sequence[DraftToken]) -> list[int]:
    """Return the tokens down to the last draft token."""
    path, at = [], len(draft_tokens) - 1
    while at >= 0:
        path.append(draft_tokens[at].id)
        at = draft_tokens[at].parent
    return path[::-1]


def _merged(
    sources: Sequence[DraftSource], states: Sequence[tuple[int, Any]], depth: int, branches: int
) -> list[tuple[float, tuple[tuple[int, DraftCandidate], ...]]]:
    """Return (chance, candidates by source) of at most `branches` tokens; a token gets its highest chance."""
    if len(states) == 1:
        ((i, state),) = states
        return [(candidate.chance, ((i, candidate),)) for candidate in sources[i].offers(state, depth, branches)]
    by_token: dict[int, list[tuple[int, DraftCandidate]]] = {}
    for i, state in states:  # sources are ordered by cost, the cheapest first
        offers = sources[i].offers(state, depth, branches)
        for candidate in offers:
            by_token.setdefault(candidate.id, []).append((i, candidate))
        if offers and offers[0].chance >= SURE:
            break
    merged = [(max(one.chance for _, one in candidates), tuple(candidates)) for candidates in by_token.values()]
    if len(merged) > branches:
        merged.sort(key=lambda item: -item[0])
        del merged[branches:]
    return merged


def decided(draft_tokens: Sequence[DraftToken], new: Sequence[int]) -> list[tuple[DraftToken, bool]]:
    """Return each draft token whose parent was accepted, and whether it was accepted itself; in order of depth.

    Draft tokens that were not verified are compared with `new` as well, at no cost.
    """
    below: dict[int, list[int]] = {}
    for i, draft_token in enumerate(draft_tokens):
        below.setdefault(draft_token.parent, []).append(i)
    outcomes, parent = [], -1
    for token in new:
        accepted = -2
        for i in below.get(parent, ()):
            is_right = draft_tokens[i].id == token
            outcomes.append((draft_tokens[i], is_right))
            if is_right:
                accepted = i
        if accepted < 0:
            break
        parent = accepted
    return outcomes


# Acceptance rates of draft tokens by class; old evidence fades.


class AcceptanceRates:
    """Acceptance rates by cell of a table. A cell starts at a given rate, which counts as a few draft tokens."""

    _DECAY = 0.98  # per draft token: about the last 50 count
    _PRIOR = 2.0  # draft tokens that the starting rates count as
    _MOST = 0.98  # upper limit of a rate

    def __init__(self, start: Sequence[Sequence[float]], names: Sequence[str]) -> None:
        """`start[line][column]`: acceptance rate measured elsewhere. `names[line]`: name of a line in reports."""
        self._true = [[p * self._PRIOR for p in line] for line in start]
        self._seen = [[self._PRIOR for _ in line] for line in start]
        self._names = names
        self._tally = [[0, 0] for _ in start]  # first choices: accepted, drafted

    def chance(self, line: int, column: int) -> float:
        """Return the acceptance rate of this cell, to be multiplied by a candidate's share at its place."""
        return min(self._MOST, self._true[line][column] / self._seen[line][column])

    def learn(self, line: int, column: int, was_right: bool, share: float = 1.0, *, is_first: bool = True) -> None:
        """Record one draft token. `share`: its share among those at its place; the rate is accepted tokens / shares."""
        self._true[line][column] = self._DECAY * self._true[line][column] + was_right
        self._seen[line][column] = self._DECAY * self._seen[line][column] + share
        if is_first:
            self._tally[line][0] += was_right
            self._tally[line][1] += 1

    def record(self) -> tuple[AcceptanceByMatch, ...]:
        """Return the acceptance rates of first choices, by line of the table."""
        return tuple(
            AcceptanceByMatch(name, drafted, right / drafted if drafted else 0.0)
            for name, (right, drafted) in zip(self._names, self._tally, strict=True)
        )


def by_bits(value: int, most: int) -> int:
    """Return 0 for 1, 1 for 2-3, 2 for 4-7, ...; at most `most`."""
    return min(value.bit_length() - 1, most)
