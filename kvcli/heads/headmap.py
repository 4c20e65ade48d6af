"""The head map: a number from 0 to 1 for each head, from which on it needs the whole past.

Scores of a probe have no unit in common, and KL spans many powers of ten. So a head's number is s / (s + t), where t is
the least score among the heads that together carry most of the whole: from 0.5 on a head is one of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

CARRY = 0.9  # of the sum of all scores, carried by the heads that are kept full
FULL = 0.5  # the number from which on


def headmap(score: Tensor, carry: float = CARRY, least: int = 0) -> Tensor:
    """score [L, K], not negative -> [L, K] in 0..1; all 0 where no head has any score.

    At least `least` heads get 0.5 or more, if so many have a score.
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
    """(layer, KV head) of those that need the whole past, by what they carry."""
    order = heads.flatten().argsort(descending=True, stable=True).tolist()
    return [divmod(i, heads.shape[1]) for i in order if float(heads.flatten()[i]) >= FULL]
