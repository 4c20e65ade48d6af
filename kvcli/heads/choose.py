"""A policy for each head: the cheapest that recovers enough, or the best that a common budget buys.

Candidates of every head lie side by side with their recovered mass and their cost in tokens; the last one is the full
cache. The same rules as FastGen's own, on masses that are already there, so that another threshold costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.methods.policies.fastgen.head_knapsack import solve

if TYPE_CHECKING:
    from kvcli.methods.policies.fastgen.policy import FastGen


def choose(mass: Tensor, cost: Tensor, settings: FastGen, full: Tensor) -> Tensor:
    """mass, cost [C, L, K] -> [L, K] index of a candidate. `full` [L, K] bool: heads that keep everything."""
    last = mass.shape[0] - 1
    if settings.keep > 0:
        return _shared(mass, cost, settings.keep, full)
    enough = mass >= settings.least
    enough[last] = True
    best = cost.masked_fill(~enough, torch.inf).argmin(0)
    return best.masked_fill(full if settings.least < 1 else torch.ones_like(full), last)


def _shared(mass: Tensor, cost: Tensor, keep: float, full: Tensor) -> Tensor:
    """`keep` of all that is stored, shared out."""
    last, forced = mass.shape[0] - 1, full | torch.full_like(full, keep >= 1)
    cost = torch.where(forced, cost[last:], cost)  # every candidate costs what everything does
    value = mass.masked_fill(forced, 0.0)
    value[last] = value[last].masked_fill(forced, 1.0)
    chosen = solve(value.flatten(1).T.tolist(), cost.flatten(1).T.tolist(), keep * float(cost[last].sum()))
    return torch.tensor(chosen).view_as(full)
