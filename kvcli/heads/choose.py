"""Choose a FastGen candidate per head: the cheapest that recovers enough, or the best within a shared budget.

Each head has candidates with recovered attention mass and cost in tokens; the last candidate is the full cache. The
rules are those of FastGen, applied to masses already measured, so that another threshold needs no new passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.methods.policies.fastgen.head_knapsack import solve

if TYPE_CHECKING:
    from kvcli.methods.policies.fastgen.policy import FastGen


def choose(mass: Tensor, cost: Tensor, settings: FastGen, full: Tensor) -> Tensor:
    """Choose a candidate index [L, K] from mass and cost [C, L, K]. `full` [L, K] bool: heads that keep everything."""
    last = mass.shape[0] - 1
    if settings.keep > 0:
        return _shared(mass, cost, settings.keep, full)
    enough = mass >= settings.least
    enough[last] = True
    best = cost.masked_fill(~enough, torch.inf).argmin(0)
    return best.masked_fill(full if settings.least < 1 else torch.ones_like(full), last)


def _shared(mass: Tensor, cost: Tensor, keep: float, full: Tensor) -> Tensor:
    """Choose candidates within the budget `keep`, a share of all stored tokens."""
    last, forced = mass.shape[0] - 1, full | torch.full_like(full, keep >= 1)
    cost = torch.where(forced, cost[last:], cost)  # every candidate gets the cost of the full cache
    value = mass.masked_fill(forced, 0.0)
    value[last] = value[last].masked_fill(forced, 1.0)
    chosen = solve(value.flatten(1).T.tolist(), cost.flatten(1).T.tolist(), keep * float(cost[last].sum()))
    return torch.tensor(chosen).view_as(full)
