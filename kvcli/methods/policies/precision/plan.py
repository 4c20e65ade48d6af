"""Choose the precision level of each slot that keeps most of the score sum within a byte budget: one knapsack.

A slot of score v keeps v * QUALITY[bits]. By Lagrange's rule each slot takes the level that maximises v * q - price *
bytes, independently of the others, and the price is the lowest at which all slots fit. Only levels on the upper hull of
q over bytes are ever best, so a slot is demoted when its score falls below the price times a constant. The number of
slots per level at a given price is read off sorted scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.kv.cache.precision_budget import PrecisionBudget
    from kvcli.kv.slots import LevelSpan

# share of a slot's score left at so many bits: 1 - (error of the head's output from quantizing the slot) / (error from
# dropping the slot); means over the demo model and SmolLM2-135M (tests/bench/rounding.py)
QUALITY = {16: 1.0, 8: 0.955, 4: 0.85, 2: 0.41, 0: 0.0}
# share of a slot's score left in a tier read by sparse attention: same measure and models, reading one slot in 16 by
# `sketch` (a minimum of 1,024 tokens out of 16k); with other indexes 0.70 (minmax) to 0.85 (lowrank)
FOUND = 0.84
HALVINGS = 48  # bisection steps for the price, on a logarithmic scale


@dataclass(frozen=True, slots=True)
class Layer:
    """The competing slots of one layer."""

    number: int  # index of the layer
    worth: Tensor  # [K, S] float32 scores, +inf = keeps its level
    level: Tensor  # [K, S] int8 level of each slot, -1 = empty
    columns: Sequence[int] = ()  # slots per head of each level, top first: heads padded to the longest, with holes
    whole: float = 0.0  # score sum of all competing tokens, dropped ones included


@dataclass(frozen=True, slots=True)
class LevelPath:
    """Demotions of the slots of one level as the price rises: to level `to[0]` below score `at[0]` * price, etc."""

    to: tuple[int, ...]
    at: tuple[float, ...]  # falling


def level_paths(costs: Sequence[float], quality: Sequence[float]) -> list[LevelPath]:
    """Return the demotion path of each level, best level first: along the upper hull of quality over cost below it."""
    found = []
    for start in range(len(costs)):
        here, to, at = start, list[int](), list[float]()
        while here + 1 < len(costs):
            saved = {r: costs[here] - costs[r] for r in range(here + 1, len(costs)) if costs[r] < costs[here]}
            if not saved:
                break
            # least quality lost per byte saved; the lowest of equals
            best = min(saved, key=lambda r: ((quality[here] - quality[r]) / saved[r], -r))
            lost = max(quality[here] - quality[best], 1e-12)
            to, at, here = [*to, best], [*at, saved[best] / lost], best
        found.append(LevelPath(tuple(to), tuple(at)))
    return found


def price(layers: Sequence[Layer], spending: PrecisionBudget, most: float) -> float:
    """Return the lowest price at which the layers take at most `most` bytes; inf: no finite price suffices."""
    sorted_, low, high = [_sorted(layer, spending) for layer in layers], np.inf, 0.0
    for of in sorted_:
        for way, heads in zip(of.ways, of.worths, strict=True):
            for each in heads if way.at else ():
                finite = each[np.isfinite(each) & (each > 0)]
                if finite.size:
                    low = min(low, float(finite[0]) / way.at[0])
                    high = max(high, float(finite[-1]) / way.at[-1])
    if sum(of.nbytes(0.0, spending) for of in sorted_) <= most:
        return 0.0
    low, high = np.log(min(low, high or 1.0)) - 1e-6, np.log(high or 1.0) + 1e-6
    if sum(of.nbytes(np.exp(high), spending) for of in sorted_) > most:
        return float("inf")
    if sum(of.nbytes(np.exp(low), spending) for of in sorted_) <= most:
        return float(np.exp(low))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        fits = sum(of.nbytes(np.exp(middle), spending) for of in sorted_) <= most
        low, high = (low, middle) if fits else (middle, high)
    return float(np.exp(high))


def levels(layer: Layer, spending: PrecisionBudget, at: float) -> Tensor:
    """Return the level of each slot at this price, int8 [K, S]; empty slots have 0."""
    found = layer.level.clamp(min=0).clone()
    for level, way in enumerate(ways_of(layer.number, spending)):
        is_here = layer.level == level
        for to, factor in zip(way.to, way.at, strict=True):
            found[is_here & (layer.worth < _threshold(at, factor))] = to
    return found


def in_place(layer: Layer, spending: PrecisionBudget, found: Tensor) -> Tensor:
    """Limit the levels `found` to the capacity of the offload tier: of the slots sent there, those with the lowest
    scores are dropped, or keep their level if no byte budget is set. Returns `found` itself if all fit."""
    there = len(spending.bits) + 1
    if not spending.has_place or spending.holds is None:
        return found
    left = max(0, spending.holds - layer.columns[there])
    for level in range(there):  # each level is moved separately, heads padded to the longest
        goes = (found == there) & (layer.level == level)  # [K, S]
        n = int(goes.sum(1).max())
        if n > left:
            bound = layer.worth.masked_fill(~goes, -np.inf).topk(left + 1, dim=1).values[:, -1:]
            found = found.masked_fill(goes & (layer.worth <= bound), spending.last if spending.asked else level)
        left = max(0, left - n)
    return found


@dataclass(frozen=True, slots=True)
class _Sorted:
    number: int
    ways: list[LevelPath]
    worths: list[list[np.ndarray]]  # scores by level and head, rising
    columns: Sequence[int]

    def nbytes(self, price: float, spending: PrecisionBudget) -> float:
        counts = [[0] * len(heads) for heads in self.worths]
        for level, (way, heads) in enumerate(zip(self.ways, self.worths, strict=True)):
            for head, worths in enumerate(heads):
                below = [int(np.searchsorted(worths, _threshold(price, factor))) for factor in way.at]
                for to, n, more in zip((level, *way.to), (len(worths), *below), (*below, 0), strict=True):
                    counts[to][head] += n - more
        if spending.has_place:  # its heads are padded to the longest, and holes take the same bytes
            there = spending.last - 1
            new = max(n - len(held) for n, held in zip(counts[there], self.worths[there], strict=True))
            counts[there] = [self.columns[there] + new] * len(counts[there])
        return spending.nbytes(self.number, counts)


def _threshold(price: float, factor: float) -> np.float32:
    """Return price * factor, rounded to float32 once so that counting and selection agree on a score equal to it."""
    return np.float32(price * factor)


def _sorted(layer: Layer, spending: PrecisionBudget) -> _Sorted:
    worth, level = layer.worth.cpu().numpy(), layer.level.cpu().numpy()
    each = [[np.sort(w[r == at]) for w, r in zip(worth, level, strict=True)] for at in range(spending.last + 1)]
    return _Sorted(layer.number, ways_of(layer.number, spending), each, layer.columns)


def ways_of(number: int, spending: PrecisionBudget) -> list[LevelPath]:
    """Return the demotion path of each level; the offload tier has none, because holes there take the same bytes."""
    costs = spending.each(number)
    if spending.has_place and spending.holds == 0:
        costs[len(spending.bits) + 1] = np.inf
    found = [level_paths(costs, quality(spending, level))[level] for level in range(spending.last + 1)]
    if spending.has_place:
        found[-2] = LevelPath((), ())
    return found


def quality(spending: PrecisionBudget, level: int = 0) -> list[float]:
    """Return, by level, the share of its score that a slot of level `level` keeps there; offloading keeps precision."""
    left = [QUALITY[bits] for bits in (16, *spending.bits)]
    came = left[level] if level < len(left) else 1.0
    there = came if spending.is_read else FOUND * came
    return [*left, *([there] if spending.has_place else []), 0.0]


def together(worth: Tensor, level: Tensor, spans: Sequence[LevelSpan]) -> Tensor:
    """Return the scores [K, S] averaged over each unit of slots, because the slots of a unit are demoted together."""
    found, first = worth.clone(), 0
    for span in spans:
        for head in range(worth.shape[0]) if span.group > 1 else ():
            n = int((level[head, first : first + span.n] >= 0).sum()) // span.group * span.group
            part = found[head, first : first + n].view(-1, span.group)
            part[:] = part.mean(1, keepdim=True)
        first += span.n
    return found
