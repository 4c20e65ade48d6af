"""Choose the draft tokens that the next pass of a draft model expands: a chain, or a tree with alternatives.

OPT-Tree (arXiv 2406.17276, as in SpecExtend) expands level by level. DySpec (arXiv 2410.11744) expands the likeliest
leaves at any depth. Sequoia (arXiv 2402.12374) has one shape for all trees, the best one at the measured acceptance by
rank and the measured pass times. CaPE (GliDe, arXiv 2402.02082) is a chain with more alternatives where the draft model
is unsure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import nlargest
from math import exp, log
from typing import Literal, NamedTuple, Protocol

# Rules that stop a draft sooner than the marginal one of draft_controller.py, never later.
#
# SpecDec++ (Huang et al., arXiv 2405.19715) stops once the probability of a rejection among all draft tokens exceeds a
# bound. DISCO (Mamou et al., arXiv 2405.04304) has a classifier judge each draft token by itself. The papers train
# their classifiers beforehand. Here the first rule takes its chances from the measured acceptance rates, and the second
# is fitted while decoding. Only draft tokens whose parents were accepted are learned from, because the others were
# never tested.

Rule = Literal["marginal", "reject", "disco"]
_RATE = 0.05  # learning rate, per draft token


class StopRule(Protocol):
    """Rule that is asked after each draft token."""

    def goes_on(self, chances: Sequence[float]) -> bool:
        """True if another draft token may follow tokens whose cumulative chances of acceptance are `chances`."""

    def learn(self, chances: Sequence[float], was_right: bool) -> None:
        """Record if the last of these tokens was accepted; all before it were."""


def rule(name: Rule, risk: float) -> StopRule | None:
    """Return the stop rule of this name; None = the marginal rule alone."""
    if name == "marginal":
        return None
    return Reject(risk) if name == "reject" else Disco(risk)


class Reject:
    """Stop rule: stops when one of all draft tokens is rejected with a probability above `risk` (SpecDec++)."""

    def __init__(self, risk: float) -> None:
        self._risk = risk

    def goes_on(self, chances: Sequence[float]) -> bool:
        return 1 - chances[-1] <= self._risk

    def learn(self, chances: Sequence[float], was_right: bool) -> None:
        """Record no further data: the acceptance rates behind `chances` are already updated."""


class Disco:
    """Stop rule: stops when the newest token's chance of rejection exceeds `risk`, by logistic regression (DISCO)."""

    def __init__(self, risk: float) -> None:
        self._risk = risk
        self._weights = [0.0, 1.0, 0.0, 0.0]  # start: the log odds of the measured chance

    def goes_on(self, chances: Sequence[float]) -> bool:
        return 1 - self._chance(_features(chances)) <= self._risk

    def learn(self, chances: Sequence[float], was_right: bool) -> None:
        features = _features(chances)
        by = _RATE * (was_right - self._chance(features))
        self._weights = [w + by * x for w, x in zip(self._weights, features, strict=True)]

    def _chance(self, features: Sequence[float]) -> float:
        score = sum([w * x for w, x in zip(self._weights, features, strict=True)])
        return 1 / (1 + exp(-max(-30.0, min(30.0, score))))


def _features(chances: Sequence[float]) -> tuple[float, float, float, float]:
    """Return a constant, the log odds of the newest draft token alone and of the whole path, and the depth."""
    alone = chances[-1] / chances[-2] if len(chances) > 1 else chances[-1]
    return 1.0, _odds(alone), _odds(chances[-1]), len(chances) / 8


def _odds(chance: float) -> float:
    chance = max(0.001, min(0.999, chance))
    return log(chance / (1 - chance))


Kind = Literal["chain", "opt", "best", "sequoia", "cape"]
_UNSURE = ((0.8, 1), (0.6, 3), (0.3, 5), (0.0, 7))  # CaPE: number of choices where the first one's chance is above


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Node of a fixed tree shape: the shapes after its first choice, its second, ..."""

    below: tuple[TreeShape, ...] = ()

    def cut(self, depth: int) -> TreeShape:
        """Return the shape without nodes deeper than `depth`."""
        return TreeShape(tuple(below.cut(depth - 1) for below in self.below) if depth else ())

    def rows(self) -> list[tuple[int, int, TreeShape]]:
        """Return the nodes with nodes below, level by level from this one on: index of the parent, rank, shape."""
        found = [(-1, 0, self)]
        for at, (_, _, shape) in enumerate(found):  # which grows by each node's
            found += [(at, rank, below) for rank, below in enumerate(shape.below) if below.below]
        return found


@dataclass(slots=True)
class TreeNode:
    """Node of a draft tree after its draft pass, with the choices that follow; the root is the sequence's end."""

    row: int  # row in all passes over draft tokens; -1 = the sequence's end
    path: tuple[int, ...]  # draft tokens from the sequence's end
    chance: float  # chance that this node is accepted
    ids: list[int]  # choices, the best first
    scores: list[float]
    chances: list[float]  # chances of the offered choices, given that this node is accepted
    shape: TreeShape | None = None  # Sequoia's, from here down
    below: dict[int, int] = field(default_factory=dict)  # choice -> index of its node


class Leaf(NamedTuple):
    """Choice that has not been through a draft pass."""

    chance: float  # chance that it is accepted
    place: int  # index of the node
    rank: int


@dataclass(frozen=True)
class Growth:
    """Growth rule of a draft tree."""

    kind: Kind = "chain"
    branches: int = 3  # maximum choices at one node
    wide: int = 4  # maximum rows of a pass; a chain has one
    nodes: int = 15  # maximum draft tokens that will be verified
    least: float = 0.0  # gain in accepted tokens required for another pass; 0 = decided by measured times

    def offered(self, first: float, shape: TreeShape | None) -> int:
        """Return the number of choices at a node whose first choice has the chance `first`."""
        if self.kind == "cape":
            return min(self.branches, next(n for above, n in _UNSURE if first >= above))
        return self.branches if shape is None else len(shape.below)

    def fixed(self, depth: int, planned: TreeShape | None, most: int) -> TreeShape | None:
        """Return the shape of all trees of this `depth`; None = choices decide it. `planned`: Sequoia's; `most`:
        choices after a row."""
        if self.kind == "sequoia" and planned is not None and self.branches <= most:
            shape, levels = planned.cut(depth), [0]
            for above, _, _ in shape.rows()[1:]:
                levels.append(levels[above] + 1)
            return shape if max(map(levels.count, levels)) <= self.wide else None
        shape = TreeShape()
        for _ in range(depth):
            shape = TreeShape((shape, *[TreeShape()] * (min(self.branches, most) - 1)))
        return shape if self.kind == "chain" else None

    def tips(self, places: Sequence[TreeNode], newest: int, depth: int) -> list[Leaf]:
        """Return the leaves that the next pass expands, the likeliest first. `newest`: first node of the last pass;
        `depth`: most draft tokens of a path, the last of which needs no pass."""
        if self.kind in ("chain", "cape"):
            at = 0
            while places[at].ids and places[at].ids[0] in places[at].below:
                at = places[at].below[places[at].ids[0]]
            looked, ranks, wide = range(at, at + 1), 1, 1
        else:
            looked, ranks, wide = range(0 if self.kind == "best" else newest, len(places)), self.branches, self.wide
        found = [
            Leaf(place.chance * chance, i, rank)
            for i in looked
            if len((place := places[i]).path) + 1 < depth
            for rank, chance in enumerate(place.chances[:ranks])
            if place.ids[rank] not in place.below and (place.shape is None or place.shape.below[rank].below)
        ]
        return nlargest(wide, found)

    def promised(self, places: Sequence[TreeNode]) -> float:
        """Return the expected accepted tokens of the best nodes, choices of the last pass included."""
        return sum(nlargest(self.nodes, [place.chance * chance for place in places for chance in place.chances]))


def sequoia(rates: Sequence[float], most: int, depth: int, each: float, costs: Sequence[float]) -> TreeShape:
    """Return the shape with the most tokens per time. `rates`: acceptance rate of the first choice, the second, ...;
    `most`: draft tokens; `each`: time of a level in plain passes; `costs[n]`: of verifying n draft tokens."""
    tree = _programme(tuple(rates))
    sizes = ((nodes, levels) for levels in range(1, depth + 1) for nodes in range(levels, most + 1))
    best = max(sizes, key=lambda size: (1 + tree(*size)[0]) / (size[1] * each + costs[size[0]]))
    return tree(*best)[1]


def _programme(rates: tuple[float, ...]) -> Callable[[int, int], tuple[float, TreeShape]]:
    """Return a function: (draft tokens, levels) -> expected accepted tokens of the best tree, and its shape."""

    @cache
    def under(n: int, levels: int, rank: int) -> tuple[float, tuple[TreeShape, ...]]:
        """Return the best n draft tokens below a node, as its children from this rank on."""
        if not n or not levels or rank == len(rates):
            return 0.0, ()
        found: tuple[float, tuple[TreeShape, ...]] = (0.0, ())
        for mine in range(1, n + 1):
            down, shapes = under(mine - 1, levels - 1, 0)
            beside, others = under(n - mine, levels, rank + 1)
            if (value := rates[rank] * (1 + down) + beside) > found[0]:
                found = value, (TreeShape(shapes), *others)
        return found

    def tree(n: int, levels: int) -> tuple[float, TreeShape]:
        value, shapes = under(n, levels, 0)
        return value, TreeShape(shapes)

    return tree
