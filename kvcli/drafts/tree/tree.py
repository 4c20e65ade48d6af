"""One draft tree from several sources: the likeliest tokens first, shared prefixes once.

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

FAINT = 0.02  # chance of acceptance below which a row is not considered, if rows have to save time
_LIKELY = 0.2  # chance of a draft token above which other sources are asked to continue after it
SURE = 0.8  # chance of a token above which no further source is asked at its node


# draft tokens from the sequence's end, the maximum depth -> a state or None
Beyond = Callable[[Sequence[int], int], Any]


# a NamedTuple: dozens are made each pass, and making a frozen dataclass takes four times as long
class DraftCandidate(NamedTuple):
    """Token that one source proposes at one node of the draft tree."""

    id: int
    chance: float  # chance that the token is accepted, given that all tokens before it were
    state: Any  # state of the source after this token
    about: Any  # data that the source needs to learn from the verification of this token


class DraftSource(Protocol):
    """Draft source: proposes draft tokens, and learns how often they are accepted.

    Call order: `start`, then in each pass `root` and `offers` as often as the tree grows, `learn` for each candidate
    that was verified, and `extend`. A state belongs to its source; the tree passes it back unread.
    """

    name: str

    def start(self, ids: Sequence[int]) -> None:
        """Set the committed sequence to `ids`; data of the shared prefix may be kept."""

    def extend(self, ids: Sequence[int]) -> None:
        """Append `ids` to the sequence."""

    def root(self, depth: int) -> Any:
        """Return the state at the sequence's end; None = no candidates. No path will be deeper than `depth`."""

    def offers(self, state: Any, depth: int, branches: int) -> Sequence[DraftCandidate]:
        """Return at most `branches` different tokens after `state`, `depth` tokens after the sequence's end."""

    def safe(self, offer: DraftCandidate) -> int:
        """Return the rows that a tree beginning with this candidate may have before their cost is measured."""

    def learn(self, offer: DraftCandidate, was_right: bool) -> None:
        """Record the verification of this candidate, whose parent was accepted."""

    def record(self) -> tuple[AcceptanceByMatch, ...]:
        """Return the acceptance rates of first choices since the start, in the source's own classes."""


class DraftToken(NamedTuple):
    """Draft token: one row that may be verified."""

    id: int
    parent: int  # index among the draft tokens; -1 = the sequence's end
    chance: float  # chance that the token and all its ancestors are accepted
    named: tuple[tuple[int, DraftCandidate], ...]  # index of each source that proposed the token, and its candidate


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

    `beyond`: sources that can continue after other sources' tokens where all states end, and their functions.
    """
    if most < 1 or room < 1:
        return []
    deepest = min(most, room)
    guesses: list[DraftToken] = []
    # makes entries unequal, so that the heap never compares draft tokens; equal chances are ordered by age
    order = count()
    heap: list[tuple[float, int, DraftToken, int]] = []

    def offer(parent: int, chance: float, depth: int, states: Sequence[tuple[int, Any]]) -> None:
        """Push the candidates below `parent` on the heap."""
        for share, named in _merged(sources, states, depth, branches):
            if (p := chance * share) >= min_chance:
                heappush(heap, (-p, next(order), DraftToken(named[0][1].id, parent, p, named), depth + 1))

    roots = [(i, source.root(deepest)) for i, source in enumerate(sources)]
    offer(-1, 1.0, 0, [(i, state) for i, state in roots if state is not None])
    while heap and len(guesses) < most:
        _, _, guess, depth = heappop(heap)
        guesses.append(guess)
        if depth < deepest and len(guesses) < most:
            states = [(i, found.state) for i, found in guess.named if found.state is not None]
            if not states and beyond and guess.chance >= _LIKELY:
                path = _path(guesses)
                states = [(i, state) for i, behind in beyond if (state := behind(path, deepest)) is not None]
            offer(len(guesses) - 1, guess.chance, depth, states)
    return guesses


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
        return [(found.chance, ((i, found),)) for found in sources[i].offers(state, depth, branches)]
    by_token: dict[int, list[tuple[int, DraftCandidate]]] = {}
    for i, state in states:  # sources are ordered by cost, the cheapest first
        offers = sources[i].offers(state, depth, branches)
        for found in offers:
            by_token.setdefault(found.id, []).append((i, found))
        if offers and offers[0].chance >= SURE:
            break
    merged = [(max(found.chance for _, found in named), tuple(named)) for named in by_token.values()]
    if len(merged) > branches:
        merged.sort(key=lambda item: -item[0])
        del merged[branches:]
    return merged


def decided(draft_tokens: Sequence[DraftToken], new: Sequence[int]) -> list[tuple[DraftToken, bool]]:
    """Return each draft token whose parent was accepted, and if the token was accepted; in order of depth.

    Rows that were not verified are compared with `new` as well, at no cost.
    """
    below: dict[int, list[int]] = {}
    for i, guess in enumerate(draft_tokens):
        below.setdefault(guess.parent, []).append(i)
    found, at = [], -1
    for token in new:
        taken = -2
        for i in below.get(at, ()):
            is_right = draft_tokens[i].id == token
            found.append((draft_tokens[i], is_right))
            if is_right:
                taken = i
        if taken < 0:
            break
        at = taken
    return found


# Acceptance rates of draft tokens by kind; old evidence fades.


class AcceptanceRates:
    """Acceptance rates by cell. A cell starts at a given rate, which counts as a few draft tokens."""

    _DECAY = 0.98  # per draft token: about the last 50 count
    _PRIOR = 2.0  # draft tokens that the starting rates count as
    _MOST = 0.98  # upper limit of a rate

    def __init__(self, start: Sequence[Sequence[float]], names: Sequence[str]) -> None:
        """`start[row][column]`: acceptance rate measured elsewhere; `names[row]` for reports."""
        self._true = [[p * self._PRIOR for p in row] for row in start]
        self._seen = [[self._PRIOR for _ in row] for row in start]
        self._names = names
        self._tally = [[0, 0] for _ in start]  # first choices: accepted, drafted

    def chance(self, row: int, column: int) -> float:
        """Return the acceptance rate of this cell, to be multiplied by a candidate's share of the weight."""
        return min(self._MOST, self._true[row][column] / self._seen[row][column])

    def learn(self, row: int, column: int, was_right: bool, share: float = 1.0, *, is_first: bool = True) -> None:
        """Record one verified draft token. `share`: its part of the weight; the token counts for that much."""
        self._true[row][column] = self._DECAY * self._true[row][column] + was_right
        self._seen[row][column] = self._DECAY * self._seen[row][column] + share
        if is_first:
            self._tally[row][0] += was_right
            self._tally[row][1] += 1

    def record(self) -> tuple[AcceptanceByMatch, ...]:
        """Return the acceptance rates of first choices, by row."""
        return tuple(
            AcceptanceByMatch(name, made, right / made if made else 0.0)
            for name, (right, made) in zip(self._names, self._tally, strict=True)
        )


def by_bits(value: int, most: int) -> int:
    """Return 0 for 1, 1 for 2-3, 2 for 4-7, ...; at most `most`."""
    return min(value.bit_length() - 1, most)
