"""Pure functions that compute how many slots each head keeps, and select them by score.

Scores are [K, S], higher = kept first; -inf = no candidate, +inf = kept before all others. At equal scores the later
position wins, so that the result does not depend on the order of slots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor


def top(score: Tensor, pos: Tensor, count: Tensor) -> Tensor:
    """Select the best `count` [K] candidates of each head -> bool [K, S]."""
    late_first = pos.argsort(dim=1, descending=True, stable=True)
    best = score.gather(1, late_first).argsort(dim=1, descending=True, stable=True)
    order = late_first.gather(1, best)
    first = torch.arange(pos.shape[1], device=pos.device) < count.unsqueeze(1)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, order, first) & (score > -torch.inf)


def uniform(score: Tensor, pos: Tensor, each: int) -> Tensor:
    """Select the best `each` slots of every head."""
    return top(score, pos, torch.full_like(pos[:, 0], each) if pos.shape[1] else pos.sum(1))


def safe(score: Tensor, pos: Tensor, each: int, floor: float) -> Tensor:
    """Return the scores with the best `floor` * `each` slots of every head set to +inf, as a minimum per head."""
    return score.masked_fill(uniform(score, pos, int(floor * each)), torch.inf)


def ada(score: Tensor, pos: Tensor, each: int, floor: float) -> Tensor:
    """Select the best K * `each` slots of a layer over all its heads (AdaKV, arXiv 2407.11550)."""
    raised = safe(score, pos, each, floor)
    return uniform(raised.reshape(1, -1), pos.reshape(1, -1), each * pos.shape[0]).view_as(pos)


def pyramid(n_layers: int, each: int, beta: float, most: int, least: int = 0) -> list[int]:
    """Return the slots per head of each layer, falling in equal steps to `each` / beta (PyramidKV, arXiv 2406.02069).

    The counts sum to n_layers * `each`. The slope is reduced so that no count is above `most` or below `least`.
    """
    each = min(each, most)
    high = min(2 * each - max(each / beta, min(least, each)), float(most))
    step = 2 * (high - each) / max(1, n_layers - 1)
    ends = [round((layer + 1) * high - step * layer * (layer + 1) / 2) for layer in range(n_layers)]
    if n_layers:
        ends[-1] = n_layers * each
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def prefix(curves: Sequence[Sequence[float]], total: int, least: int) -> list[int]:
    """Return the slots per head of each layer: the fewest whose share of the layer's score sum reaches one level, found
    by bisection so that the counts sum to `total` (PrefixKV, arXiv 2412.03409). curve[n - 1] = share of the best n.

    Each layer gets at least `least` slots, or all it has if fewer. The remainder at the level just below goes to the
    layers that miss the level by most.
    """

    def at(level: float) -> list[int]:
        return [max(min(least, len(curve)), min(bisect_left(curve, level) + 1, len(curve))) for curve in curves]

    low, high = 0.0, 1.0
    while high - low > 1e-12:
        level = (low + high) / 2
        low, high = (low, level) if sum(at(level)) > total else (level, high)
    counts, above = at(low), [len(curve) for curve in curves] if total >= sum(at(1.0)) else at(high)
    missed = [low - (curve[n - 1] if n else 0.0) for curve, n in zip(curves, counts, strict=True)]
    for i in sorted(range(len(curves)), key=lambda i: (-missed[i], i)):
        counts[i] += max(0, min(above[i] - counts[i], total - sum(counts)))
    return counts


def by_weight(weights: Sequence[float], each: int, floor: float, most: int, least: int = 0) -> list[int]:
    """Return the slots of each head: `floor` * `each`, the rest in proportion to `weights` (HeadKV, arXiv 2410.19258).

    No head gets more than `most` or, if `each` allows it, less than `least`; the surplus of a full head goes to the
    others. The counts sum to `each` times the number of heads, or to all slots if there are fewer.
    """
    n = len(weights)
    each = min(each, most)
    given = [float(max(int(floor * each), min(least, each)))] * n
    left = n * each - sum(given)
    open_ = [i for i in range(n) if given[i] < most]
    while left > 1e-9 and open_:
        total = sum(weights[i] for i in open_)
        share = {i: left * (weights[i] / total if total > 0 else 1 / len(open_)) for i in open_}
        for i in open_:
            given[i] += share[i]
        left = sum(max(0.0, given[i] - most) for i in open_)
        given = [min(g, float(most)) for g in given]
        open_ = [i for i in open_ if given[i] < most]
    return whole(given, n * each, most)


def whole(given: Sequence[float], total: int, most: int) -> list[int]:
    """Round numbers to integers that sum to `total`: the largest remainders are rounded up."""
    down = [min(int(g + 1e-9), most) for g in given]
    by_rest = sorted(range(len(given)), key=lambda i: (down[i] - given[i], i))
    for i in by_rest[: total - sum(down)]:
        down[i] += 1
    return down
