"""One candidate for each head within a common budget: a multiple-choice knapsack, by the best gain for its cost.

Each head's candidates are thinned to the upper hull of value over cost, so that its upgrades get worse one by one, and
the upgrades of all heads are bought in the order of value per token until one does not fit: up to there no other choice
is better. What is left buys the best of the upgrades that still fit, on the hull or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class _Upgrade:
    loss: float  # minus value per token, so that the best comes first
    head: int
    step: int  # of its hull
    tokens: float


def solve(value: Sequence[Sequence[float]], cost: Sequence[Sequence[float]], budget: float) -> list[int]:
    """value, cost [N][C] -> the candidate of each of N heads, total cost at most `budget`.

    Where even the cheapest are more than the budget, they are the answer.
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
    """The same with the best upgrades that the rest of the budget buys."""
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
    """Candidates from the cheapest on, each dearer and better than the one before, at falling value per token."""
    order = sorted(range(len(value)), key=lambda i: (cost[i], -value[i]))
    hull = [order[0]]
    for i in order[1:]:
        if value[i] <= value[hull[-1]]:
            continue
        if cost[i] == cost[hull[-1]]:  # then the better one came first
            continue
        while len(hull) > 1 and _slope(value, cost, hull[-1], i) >= _slope(value, cost, hull[-2], hull[-1]):
            hull.pop()
        hull.append(i)
    return hull


def _slope(value: Sequence[float], cost: Sequence[float], a: int, b: int) -> float:
    return (value[b] - value[a]) / (cost[b] - cost[a])
