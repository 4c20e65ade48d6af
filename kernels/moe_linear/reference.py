"""Expert weights in plain PyTorch: the specification of `experts`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def moe_linear(x: Tensor, weights: Tensor, ends: Sequence[int]) -> Tensor:
    """Compute x [M, K] in groups, weights [E, N, K] -> [M, N]."""
    groups = x.tensor_split(list(ends))[: len(ends)]
    found = [functional.linear(rows, weight) for rows, weight in zip(groups, weights, strict=True)]
    return functional.pad(torch.cat(found), (0, 0, 0, x.shape[0] - ends[-1]))
