"""Loss of score at the precision levels of slots, and the price at which at most a given share is lost.

A byte budget limits how much may be kept; `memory.max_loss` limits how much may be lost. Both use the knapsack's
measure: a slot keeps its score times the quality of its level (plan.py), and a dropped slot keeps nothing.
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

LESS = 1 - 1e-6  # factor on a price, so that slots exactly at the threshold are kept despite rounding


def lost_share(layers: Sequence[Layer], spending: PrecisionBudget, levels: Sequence[Tensor]) -> float:
    """Return the share of the score sum of all competing slots that is lost at the given `levels` [K, S]."""
    whole = sum(layer.whole for layer in layers)
    kept = sum(_kept(layer, spending, level) for layer, level in zip(layers, levels, strict=True))
    return max(0.0, 1 - kept / whole) if whole else 0.0


def price_for_loss(layers: Sequence[Layer], spending: PrecisionBudget, share: float) -> float:
    """Return the highest price that loses at most `share`, earlier losses included; inf: any price does."""
    left = sum(layer.whole * (share - 1) + _kept(layer, spending, layer.level) for layer in layers)
    prices, losses = zip(*(_steps(layer, spending) for layer in layers), strict=True)
    device = prices[0].device
    price, order = torch.cat([of.to(device) for of in prices]).sort()
    spent = torch.cat([of.to(device) for of in losses])[order].cumsum(0)
    over = int((spent <= left).sum())  # sums rise, so these are the first
    return float(price[over]) * LESS if over < len(price) else float("inf")


def counted(layer: Layer, level: Tensor, last: int) -> list[list[int]]:
    """Count slots by level and head."""
    heads = [
        on[of >= 0].long().bincount(minlength=last + 1).tolist() for on, of in zip(level, layer.level, strict=True)
    ]
    return [list(each) for each in zip(*heads, strict=True)]


def _steps(layer: Layer, spending: PrecisionBudget) -> tuple[Tensor, Tensor]:
    """Return, float64 [n] each, for every possible demotion: the price above which it happens, and the score lost."""
    competes = layer.worth.isfinite()
    prices, losses = [layer.worth.new_zeros(0).double()], [layer.worth.new_zeros(0).double()]
    for level, way in enumerate(ways_of(layer.number, spending)):
        left = quality(spending, level)
        worth = layer.worth[competes & (layer.level == level)].double()
        for above, to, factor in zip((level, *way.to), way.to, way.at, strict=False):
            prices.append(worth / factor)
            losses.append(worth * (left[above] - left[to]))
    return torch.cat(prices), torch.cat(losses)


def _kept(layer: Layer, spending: PrecisionBudget, level: Tensor) -> float:
    """Return the score sum of the competing slots that is left at the given `level`."""
    left = [quality(spending, start) for start in range(spending.last + 1)]
    of_levels = torch.tensor(left, dtype=torch.float64, device=level.device)
    worth = layer.worth.double().masked_fill(layer.worth.isinf() | (layer.level < 0), 0.0)
    return float((worth * of_levels[layer.level.clamp(min=0).long(), level.clamp(min=0).long()]).sum())
