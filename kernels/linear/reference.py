"""A linear layer in plain PyTorch: the specification of `linear`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x [..., K], weight [N, K], bias [N] -> [..., N]."""
    return functional.linear(x, weight, bias)
