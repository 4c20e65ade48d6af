"""What slots lose of their worth on the rungs where they lie, and the price at which no more than a share is lost.

A budget of bytes says how much may be kept; this says how much must be. By the knapsack's own measure: a slot on a rung
keeps its worth times what rounding leaves of it there (plan.py), one that is gone nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvcli.methods.policies.precision.plan import quality, ways_of

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.kv.cache.precision_budget import PrecisionBudget
    from kvcli.methods.policies.precision.plan import Layer

LESS = 1 - 1e-6  # of a price, so that what is worth just as much stays, however either was rounded


def lost_share(layers: Sequence[Layer], spending: PrecisionBudget, rungs: Sequence[Tensor]) -> float:
    """Share of the worth of all that competes that is lost where `rungs` [K, S] say that its slots lie."""
    whole = sum(layer.whole for layer in layers)
    kept = sum(_kept(layer, spending, rung) for layer, rung in zip(layers, rungs, strict=True))
    return max(0.0, 1 - kept / whole) if whole else 0.0


def price_for_loss(layers: Sequence[Layer], spending: PrecisionBudget, share: float) -> float:
    """The highest price at which at most that share is lost; what was lost before counts. inf: all that may go does."""
    left = sum(layer.whole * (share - 1) + _kept(layer, spending, layer.rung) for layer in layers)
    prices, losses = zip(*(_steps(layer, spending) for layer in layers), strict=True)
    device = prices[0].device
    price, order = torch.cat([of.to(device) for of in prices]).sort()
    spent = torch.cat([of.to(device) for of in losses])[order].cumsum(0)
    over = int((spent <= left).sum())  # rising, so those come first
    return float(price[over]) * LESS if over < len(price) else float("inf")


def counted(layer: Layer, rung: Tensor, last: int) -> list[list[int]]:
    """By rung and head, how many slots lie there."""
    heads = [on[of >= 0].long().bincount(minlength=last + 1).tolist() for on, of in zip(rung, layer.rung, strict=True)]
    return [list(each) for each in zip(*heads, strict=True)]


def _steps(layer: Layer, spending: PrecisionBudget) -> tuple[Tensor, Tensor]:
    """float64 [n]: of each step down that a slot may take, above which price it does, and what it loses by it."""
    competes = layer.worth.isfinite()
    prices, losses = [layer.worth.new_zeros(0).double()], [layer.worth.new_zeros(0).double()]
    for rung, way in enumerate(ways_of(layer.number, spending)):
        left = quality(spending, rung)
        worth = layer.worth[competes & (layer.rung == rung)].double()
        for above, to, factor in zip((rung, *way.to), way.to, way.at, strict=False):
            prices.append(worth / factor)
            losses.append(worth * (left[above] - left[to]))
    return torch.cat(prices), torch.cat(losses)


def _kept(layer: Layer, spending: PrecisionBudget, rung: Tensor) -> float:
    """Worth that is left of what competes."""
    left = [quality(spending, start) for start in range(spending.last + 1)]
    of_rungs = torch.tensor(left, dtype=torch.float64, device=rung.device)
    worth = layer.worth.double().masked_fill(layer.worth.isinf() | (layer.rung < 0), 0.0)
    return float((worth * of_rungs[layer.rung.clamp(min=0).long(), rung.clamp(min=0).long()]).sum())
