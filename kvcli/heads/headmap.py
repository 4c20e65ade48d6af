"""Head map: a number from 0 to 1 for each head; heads from 0.5 on need the full KV cache.

Scores of different probes have no common unit, and KL spans many powers of ten. So a head's number is s / (s + t),
where t is the lowest score among the top heads that together have most of the score sum. These heads get 0.5 or more.
"""

from __future__ import annotations

import torch
from torch import Tensor

CARRY = 0.9  # share of the score sum in the heads that keep the full cache
FULL = 0.5  # heads from this number on keep the full cache


def headmap(score: Tensor, carry: float = CARRY, least: int = 0) -> Tensor:
    """Convert scores [L, K], not negative, to a head map [L, K] in 0..1; all 0 if all scores are 0.

    At least `least` heads get 0.5 or more, if so many have a score above 0.
    """
    ranked = score.flatten().double().sort(descending=True).values
    total = float(ranked.sum())
    if total <= 0:
        return torch.zeros_like(score, dtype=torch.float64)
    needed = int((ranked.cumsum(0) < carry * total * (1 - 1e-9)).sum()) + 1
    needed = max(needed, min(least, int((ranked > 0).sum())))
    threshold = float(ranked[needed - 1])
    value = score.double()
    return value / (value + threshold)


def full_heads(heads: Tensor) -> list[tuple[int, int]]:
    """Return (layer, KV head) of the heads that need the full KV cache, highest number first."""
    order = heads.flatten().argsort(descending=True, stable=True).tolist()
    return [divmod(i, heads.shape[1]) for i in order if float(heads.flatten()[i]) >= FULL]
