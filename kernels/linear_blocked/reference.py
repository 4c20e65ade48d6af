"""A linear layer in plain PyTorch: the specification of `linear_blocked`."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear


def linear_blocked(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x [..., I], weight [O, I], bias [O] -> [..., O]."""
    return linear(x, weight, bias)
