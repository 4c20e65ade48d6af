"""Multiple-choice knapsack: choose one candidate per head within a shared budget, by the best gain for its cost.

Each head's candidates are reduced to the upper hull of value over cost, so that its upgrades have falling gain. The
upgrades of all heads are bought in order of value per token until one does not fit; up to there the choice is optimal.
The remaining budget buys the best of the upgrades that still fit, on the hull or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class _Upgrade:
    loss: float  # minus value per token, so that the best sorts first
    head: int
    step: int  # index in the head's hull
    tokens: float


def solve(value: Sequence[Sequence[float]], cost: Sequence[Sequence[float]], budget: float) -> list[int]:
    """Choose a candidate for each of N heads from value, cost [N][C], with a total cost of at most `budget`.

    If even the cheapest candidates exceed the budget, they are returned.
    """
    hulls = [_hull(v, c) for v, c in zip(value, cost, strict=True)]
    left = budget - sum(cost[head][hull[0]] for head, hull in enumerate(hulls))
    upgrades = []
    for head, hull in enumerate(hulls):
        for step in range(1, len(hull)):
            tokens = cost[head][hull[step]] - cost[head][hull[step - 1]]
            gain = value[head][hull[step]] - value[head][hull[step - 1]]
            upgrades.append(_Upgrade(-gain / tokens, head, step, tokens))
    chosen = [hull[0] for hull in hulls]
    for up in sorted(upgrades):
        if up.tokens > left:
            break
        left -= up.tokens
        chosen[up.head] = hulls[up.head][up.step]
    return _fill(value, cost, chosen, left)


def _fill(
    value: Sequence[Sequence[float]], cost: Sequence[Sequence[float]], chosen: list[int], left: float
) -> list[int]:
    """Add the best upgrades that the rest of the budget buys to `chosen`."""
    while True:
        fits = [
            ((value[head][i] - value[head][now]) / (cost[head][i] - cost[head][now]), -head, i)
            for head, now in enumerate(chosen)
            for i in range(len(value[head]))
            if value[head][i] > value[head][now] and 0 < cost[head][i] - cost[head][now] <= left
        ]
        if not fits:
            return chosen
        _, head, i = max(fits)
        left -= cost[-head][i] - cost[-head][chosen[-head]]
        chosen[-head] = i


def _hull(value: Sequence[float], cost: Sequence[float]) -> list[int]:
    """Return the candidates on the upper hull, cheapest first: rising cost and value, falling value per token."""
    order = sorted(range(len(value)), key=lambda i: (cost[i], -value[i]))
    hull = [order[0]]
    for i in order[1:]:
        if value[i] <= value[hull[-1]]:
            continue
        if cost[i] == cost[hull[-1]]:  # the better one was sorted first
            continue
        while len(hull) > 1 and _slope(value, cost, hull[-1], i) >= _slope(value, cost, hull[-2], hull[-1]):
            hull.pop()
        hull.append(i)
    return hull


def _slope(value: Sequence[float], cost: Sequence[float], a: int, b: int) -> float:
    return (value[b] - value[a]) / (cost[b] - cost[a])
