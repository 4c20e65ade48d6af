"""One tree of guesses from several sources: the likeliest first, shared beginnings once.

Merging retrieval and logits in one tree is RACER's direction (arXiv 2604.14885); best-first admission under a budget of
rows is SuffixDecoding's (arXiv 2411.04975). A token that two sources name at one place costs one row, and is expanded
by both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from kvcli.engine.drafting.report import AcceptanceByMatch

FAINT = 0.02  # chance of acceptance below which a row is not even considered, where rows have to pay
_LIKELY = 0.2  # chance of a guess above which other sources are asked how it goes on
SURE = 0.8  # chance of a token above which no further source is asked about its place


Beyond = Callable[[Sequence[int], int], Any]  # guesses from the text on, the deepest there may be -> a state or None


class DraftCandidate(NamedTuple):  # dozens are made each pass, and making a frozen dataclass takes four times as long
    """A token that one source names at one place of the tree."""

    id: int
    chance: float  # that the model takes it, given that it took all before it
    state: Any  # where the source stands behind it
    about: Any  # what the source wants back when it learns what came


class DraftSource(Protocol):
    """Names tokens that may come next, and learns how often it is right.

    `start`, then in each pass `root` and `offers` as often as the tree grows, `learn` for each offer that was decided,
    and `extend`. A state is the source's own; the tree hands it back unread.
    """

    name: str

    def start(self, ids: Sequence[int]) -> None:
        """The committed text is now `ids`; what it shares with the text before may be kept."""

    def extend(self, ids: Sequence[int]) -> None:
        """`ids` joined the text."""

    def root(self, depth: int) -> Any:
        """Where it stands at the text's end; None = nothing to offer. No path will be deeper than `depth`."""

    def offers(self, state: Any, depth: int, branches: int) -> Sequence[DraftCandidate]:
        """At most `branches` different tokens behind `state`, which is `depth` tokens below the text's end."""

    def safe(self, offer: DraftCandidate) -> int:
        """Rows that a tree beginning with this offer may have before their cost has been measured."""

    def learn(self, offer: DraftCandidate, was_right: bool) -> None:
        """The model took the offer's parent, and then this token or another."""

    def record(self) -> tuple[AcceptanceByMatch, ...]:
        """How often first choices were right, in the source's own classes, since its beginning."""


class DraftToken(NamedTuple):
    """One row that could be verified."""

    id: int
    parent: int  # index among the guesses, -1 = follows the text
    chance: float  # of being accepted, ancestors included
    named: tuple[tuple[int, DraftCandidate], ...]  # by whom: index of the source, what it offered


def grow(
    sources: Sequence[DraftSource],
    most: int,
    room: int,
    branches: int,
    min_chance: float = FAINT,
    beyond: Sequence[tuple[int, Beyond]] = (),
) -> list[DraftToken]:
    """Up to `most` guesses, the likeliest first, none deeper than `room`; a parent comes before its children.

    `beyond`: sources that go on, where all end, behind what others named, and how they do.
    """
    if most < 1 or room < 1:
        return []
    deepest = min(most, room)
    guesses: list[DraftToken] = []
    order = count()  # the heap must not compare guesses; equal chances go by recency
    heap: list[tuple[float, int, DraftToken, int]] = []

    def offer(parent: int, chance: float, depth: int, states: Sequence[tuple[int, Any]]) -> None:
        """Put what the sources name below `parent` on the heap."""
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


def _path(guesses: Sequence[DraftToken]) -> list[int]:
    """The tokens down to the last one."""
    path, at = [], len(guesses) - 1
    while at >= 0:
        path.append(guesses[at].id)
        at = guesses[at].parent
    return path[::-1]


def _merged(
    sources: Sequence[DraftSource], states: Sequence[tuple[int, Any]], depth: int, branches: int
) -> list[tuple[float, tuple[tuple[int, DraftCandidate], ...]]]:
    """(chance, who named it) of at most `branches` tokens; a token's chance is that of the source surest of it."""
    if len(states) == 1:
        ((i, state),) = states
        return [(found.chance, ((i, found),)) for found in sources[i].offers(state, depth, branches)]
    by_token: dict[int, list[tuple[int, DraftCandidate]]] = {}
    for i, state in states:  # the cheapest source comes first
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


def decided(guesses: Sequence[DraftToken], new: Sequence[int]) -> list[tuple[DraftToken, bool]]:
    """Each guess whose parent the text `new` took, and whether it took the guess; in order of depth.

    Rows that were not verified are decided as well, and cost nothing.
    """
    below: dict[int, list[int]] = {}
    for i, guess in enumerate(guesses):
        below.setdefault(guess.parent, []).append(i)
    found, at = [], -1
    for token in new:
        taken = -2
        for i in below.get(at, ()):
            is_right = guesses[i].id == token
            found.append((guesses[i], is_right))
            if is_right:
                taken = i
        if taken < 0:
            break
        at = taken
    return found
