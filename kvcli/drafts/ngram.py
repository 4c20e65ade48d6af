"""Draft by copying: what followed the same words earlier in the text is the guess for what follows now.

Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) copies one place; SuffixDecoding (arXiv 2411.04975) merges
all places into a tree by frequency, and SAM-Decoding (arXiv 2411.10666) trusts a guess by the length of its match. Here
a guess is trusted by match length and by how many places agree, which says more than length does for short matches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Annotated, NamedTuple

from kvcli.drafts.pace import Accepted, Mode, Pace, Report
from kvcli.schema import Range

if TYPE_CHECKING:
    from kvcli.drafts.suffix import SuffixIndex
    from kvcli.policies.base import Policy
    from kvcli.rows import Draft
    from kvcli.stats import Step

_PLACES = 16  # earlier places merged into one tree; 32 found nothing more in replayed code and docs
_SHORTER = 0.25  # weight of a place per token that its match is shorter than the longest
_FAINT = 0.02  # chance of acceptance below which a row is not even considered
_PAPER = 8  # tokens that a guess on paper must get right


@dataclass(frozen=True)
class Ngram:
    """Copy from the text itself; `[spec] method = "ngram"`."""

    # with 15 guesses a pass has 16 rows, a whole block for most kernels
    max: Annotated[int, Range(1, 128)] = 15  # rows verified beside the pending one, at most
    min_match: Annotated[int, Range(1, 64)] = 1  # tokens that must match before their continuation is a guess
    max_match: Annotated[int, Range(1, 256)] = 32  # tokens beyond which matches count as equally long
    branches: Annotated[int, Range(1, 16)] = 3  # different tokens tried at one place, at most
    adaptive: bool = True  # draft as much as the measured pass times justify; false = always, by match length
    kill_below: Annotated[float, Range(0, 1)] = 0.98  # pause when slower than this multiple of plain decoding
    probe_every: Annotated[int, Range(8, 4096)] = 64  # passes between two plain passes timed as the yardstick

    def __post_init__(self) -> None:
        _whole("max", self.max, 1, 128)
        _whole("min_match", self.min_match, 1, 64)
        _whole("max_match", self.max_match, self.min_match, 256)
        _whole("branches", self.branches, 1, 16)
        _whole("probe_every", self.probe_every, 8, 4096)
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive = {self.adaptive!r} must be true or false")
        if isinstance(self.kill_below, bool) or not isinstance(self.kill_below, int | float):
            raise ValueError(f"kill_below = {self.kill_below!r} must be a number from 0 to 1")
        if not 0 <= self.kill_below <= 1:
            raise ValueError(f"kill_below = {self.kill_below} must be from 0 (never pause) to 1")

    def drafter(self) -> NgramDrafter:
        """A drafter that knows no text yet."""
        return NgramDrafter(self)


class Odds:
    """How often guesses come true, by match length and by who names them; old evidence fades."""

    _DECAY = 0.98  # per guess: the last 50 or so count
    _PRIOR = 2.0  # guesses that the starting values are worth
    # Rows: matches of 1, 2-3, 4-7, 8-15, 16-31, 32+ tokens. Columns: the first choice of 1, of 2, of 3 or more places,
    # and any later choice, apart because the best of several shares is more luck than it seems.
    # From replayed Python files and Markdown docs, rounded down.
    _START = (
        (0.3, 0.5, 0.7, 0.5),
        (0.5, 0.75, 0.9, 0.6),
        (0.65, 0.8, 0.9, 0.6),
        (0.75, 0.85, 0.9, 0.6),
        (0.85, 0.9, 0.95, 0.6),
        (0.9, 0.95, 0.95, 0.6),
    )

    def __init__(self) -> None:
        self._true = [[p * self._PRIOR for p in row] for row in self._START]
        self._seen = [[self._PRIOR for _ in row] for row in self._START]
        self._tally = [[0, 0] for _ in self._START]  # first choices: right, made

    def chance(self, match: int, places: int, rank: int) -> float:
        """Probability that a continuation is right, once multiplied by its share of the weight."""
        row, column = _cell(match, places, rank)
        return min(0.98, self._true[row][column] / self._seen[row][column])

    def learn(self, guess: Guess, was_right: bool) -> None:
        row, column = _cell(guess.match, guess.places, guess.rank)
        self._true[row][column] = self._DECAY * self._true[row][column] + was_right
        self._seen[row][column] = self._DECAY * self._seen[row][column] + guess.share
        if not guess.rank:
            self._tally[row][0] += was_right
            self._tally[row][1] += 1

    def by_match(self) -> tuple[Accepted, ...]:
        """The record of first choices, by match length."""
        record = []
        for row, (right, made) in enumerate(self._tally):
            low, high = 1 << row, (2 << row) - 1
            name = f"{low}+" if row == len(self._tally) - 1 else f"{low}-{high}" if row else "1"
            record.append(Accepted(name, made, right / made if made else 0.0))
        return tuple(record)


class Guess(NamedTuple):  # dozens are made each pass, and making a frozen dataclass takes four times as long
    """One row that could be verified."""

    id: int
    parent: int  # index among the guesses, -1 = follows the text
    chance: float  # of being accepted, ancestors included
    match: int  # tokens that match up to here, those guessed on the way included
    places: int  # earlier places that continue like this
    rank: int  # among the children of its parent, 0 = first choice
    share: float  # of the weight at its parent


def grow(index: SuffixIndex, odds: Odds, most: int, room: int, branches: int) -> list[Guess]:
    """Up to `most` guesses, the likeliest first, none deeper than `room`; a parent comes before its children."""
    found = index.find(_PLACES)
    if not found.ends or most < 1 or room < 1:
        return []
    depth = min(most, room)
    ahead = index.following(found.ends, depth)  # [places][depth]
    weight = [_SHORTER ** (found.lengths[0] - n) for n in found.lengths]
    guesses: list[Guess] = []
    order = count()  # the heap must not compare guesses; equal chances go by recency
    heap: list[tuple[float, int, Guess, int, list[int]]] = []

    def offer(parent: int, chance: float, d: int, places: Sequence[int]) -> None:
        """Put what the places name at depth `d` on the heap."""
        named: dict[int, list[int]] = {}
        for place in places:
            named.setdefault(ahead[place][d], []).append(place)
        weights = {token: sum(weight[place] for place in agree) for token, agree in named.items()}
        total = sum(weights.values())
        ranked = sorted(named.items(), key=lambda item: -weights[item[0]])
        for rank, (token, agree) in enumerate(ranked[:branches]):
            share = weights[token] / total
            match = found.lengths[agree[0]] + d  # places come longest match first
            p = chance * share * odds.chance(match, len(agree), rank)
            if p >= _FAINT:
                guess = Guess(token, parent, p, match, len(agree), rank, share)
                heappush(heap, (-p, next(order), guess, d + 1, agree))

    offer(-1, 1.0, 0, range(len(found.ends)))
    while heap and len(guesses) < most:
        _, _, guess, d, places = heappop(heap)
        guesses.append(guess)
        if d < depth:
            offer(len(guesses) - 1, guess.chance, d, places)
    return guesses


class NgramDrafter:
    """Owns the index of the text, the record of its guesses and its pace."""

    def __init__(self, config: Ngram) -> None:
        from kvcli.drafts.suffix import SuffixIndex  # late: reading a profile must not import numpy either

        self._config = config
        self._index = SuffixIndex(config.min_match, config.max_match)
        self._odds = Odds()
        self._pace = Pace(config.kill_below, config.probe_every)
        self._guesses: list[Guess] | None = None  # of the pass under way, verified or not; None = no pass under way
        self._paper: list[int] = []  # tokens still to come true

    @property
    def view(self) -> Policy | None:
        return None

    def expect(self, costs: Mapping[int, float]) -> None:
        """Begin with these costs of passes, until they are measured here."""
        self._pace.expect(costs)

    def start(self, ids: Sequence[int]) -> None:
        self._follow(ids)
        self._pace.restart()
        self._guesses, self._paper = None, []

    def propose(self, ids: Sequence[int], room: int) -> Draft:
        from kvcli.rows import Draft  # late: reading a profile must not import torch

        n = len(self._index)
        if self._index.tail(4) != list(ids[max(0, n - 4) : n]):
            self._follow(ids)
        self._index.extend(ids[len(self._index) :])
        mode = self._pace.mode() if self._config.adaptive else Mode.DRAFT
        self._guesses = self._grow(mode, room)
        if mode is not Mode.DRAFT:
            return Draft.none()
        rows = self._rows(self._guesses)
        return Draft([g.id for g in self._guesses[:rows]], [g.parent for g in self._guesses[:rows]])

    def observe(self, step: Step) -> None:
        if self._guesses is None:
            return
        self._learn(self._guesses, step.new)
        self._hear_paper(step.new)
        self._index.extend(step.new)
        self._pace.observe(step.n_drafted, len(step.new), step.seconds)
        self._guesses = None

    def report(self) -> Report:
        """What `/spec` shows."""
        return replace(self._pace.report(), acceptance=self._odds.by_match())

    def _grow(self, mode: Mode, room: int) -> list[Guess]:
        if mode is Mode.DRAFT:
            return grow(self._index, self._odds, self._config.max, room, self._config.branches)
        if mode is Mode.PLAIN or self._paper:
            return []
        chain = grow(self._index, self._odds, _PAPER, _PAPER, branches=1)
        if len(chain) == _PAPER:
            self._paper = [g.id for g in chain]
        return chain

    def _rows(self, guesses: Sequence[Guess]) -> int:
        """How many of the guesses to verify: about two per matched token, more or fewer once the clock says so."""
        if not guesses:
            return 0
        safe = 2 * guesses[0].match + 1
        return self._pace.rows([g.chance for g in guesses], safe) if self._config.adaptive else min(safe, len(guesses))

    def _follow(self, ids: Sequence[int]) -> None:
        """Make `ids` the indexed text; what it shares with the old one stays."""
        self._index.truncate(self._index.shared(ids))
        self._index.extend(ids[len(self._index) :])

    def _learn(self, guesses: Sequence[Guess], new: Sequence[int]) -> None:
        """Walk the tokens that came down the tree. Rows that were not verified are evidence too, and cost nothing."""
        at = -1
        for token in new:
            below = [i for i, g in enumerate(guesses) if g.parent == at]
            for i in below:
                self._odds.learn(guesses[i], guesses[i].id == token)
            at = next((i for i in below if guesses[i].id == token), -2)
            if at < 0:
                return

    def _hear_paper(self, new: Sequence[int]) -> None:
        """Compare the guess on paper, made before this pass or earlier, with what came."""
        if not self._paper:
            return
        n = min(len(new), len(self._paper))
        if list(new[:n]) != self._paper[:n]:
            self._paper = []
            self._pace.hear_paper(False)
            return
        del self._paper[:n]
        if not self._paper:
            self._pace.hear_paper(True)


def _cell(match: int, places: int, rank: int) -> tuple[int, int]:
    return min(match.bit_length(), 6) - 1, 3 if rank else min(places, 3) - 1


def _whole(key: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{key} = {value!r} must be a whole number from {low} to {high}")
