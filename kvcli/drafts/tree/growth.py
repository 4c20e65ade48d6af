"""Which guesses of a second model its next pass is made of: a chain, or a tree that several may be right in.

OPT-Tree (arXiv 2406.17276, as SpecExtend has it) goes level by level; DySpec (arXiv 2410.11744) takes the likeliest
places wherever they are; Sequoia (arXiv 2402.12374) one shape for all, the best one at the measured acceptance by rank
and the measured times of passes; CaPE (GliDe, arXiv 2402.02082) a chain with more alternatives where it is unsure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import nlargest
from typing import Literal, NamedTuple

Kind = Literal["chain", "opt", "best", "sequoia", "cape"]
_UNSURE = ((0.8, 1), (0.6, 3), (0.3, 5), (0.0, 7))  # CaPE: so many choices where the first one's chance is above


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A node of a tree: how it goes on behind its first choice, its second, ..."""

    below: tuple[TreeShape, ...] = ()


@dataclass(slots=True)
class TreeNode:
    """What may come behind a guess that a pass was made of, or behind the text."""

    row: int  # of that pass, among all of guesses; -1 = of the text
    path: tuple[int, ...]  # guesses from the text on
    chance: float  # that the text gets there
    ids: list[int]  # choices, the best first
    scores: list[float]
    chances: list[float]  # of those that are offered, given that the text gets there
    shape: TreeShape | None = None  # Sequoia's, from here down
    below: dict[int, int] = field(default_factory=dict)  # choice -> its place


class Leaf(NamedTuple):
    """A choice that no pass was made of."""

    chance: float  # that the text gets behind it
    place: int
    rank: int


@dataclass(frozen=True)
class Growth:
    """One way to grow."""

    kind: Kind = "chain"
    branches: int = 3  # choices at one place, at most
    wide: int = 4  # rows of a pass, at most; a chain has one
    nodes: int = 15  # guesses that will be verified, at most
    least: float = 0.0  # accepted tokens that another pass must promise; 0 = what it costs by the clock

    def offered(self, first: float, shape: TreeShape | None) -> int:
        """Choices at a place, the first of which comes true as often as `first`."""
        if self.kind == "cape":
            return min(self.branches, next(n for above, n in _UNSURE if first >= above))
        return self.branches if shape is None else len(shape.below)

    def tips(self, places: Sequence[TreeNode], newest: int, depth: int) -> list[Leaf]:
        """What the next pass is made of, the likeliest first. `newest`: the first place of the last pass; `depth`:
        guesses in a row, at most, the last of which needs no pass."""
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
        """Accepted tokens to be expected of what would be verified, choices of the last pass among it."""
        return sum(nlargest(self.nodes, [place.chance * chance for place in places for chance in place.chances]))


def sequoia(rates: Sequence[float], most: int, depth: int, each: float, costs: Sequence[float]) -> TreeShape:
    """The shape that gives most tokens by time. `rates`: how often the first choice comes true, the second, ...;
    `most`: guesses; `each`: plain passes of a level; `costs[n]`: of verifying n guesses."""
    tree = _programme(tuple(rates))
    sizes = ((nodes, levels) for levels in range(1, depth + 1) for nodes in range(levels, most + 1))
    best = max(sizes, key=lambda size: (1 + tree(*size)[0]) / (size[1] * each + costs[size[0]]))
    return tree(*best)[1]


def _programme(rates: tuple[float, ...]) -> Callable[[int, int], tuple[float, TreeShape]]:
    """(guesses, levels) -> accepted tokens of the best tree of so many at most, and its shape."""

    @cache
    def under(n: int, levels: int, rank: int) -> tuple[float, tuple[TreeShape, ...]]:
        """The best n guesses below a node, as its children from this rank on."""
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
