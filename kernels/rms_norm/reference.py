"""RMSNorm in plain PyTorch, as model families define it: the specification of `rms_norm`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RMS:
    """Weight [H] and form of a norm on a GPU."""

    weight: Tensor
    eps: float
    form: str


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: str) -> Tensor:
    """Compute x [..., H], weight [H] -> [..., H]. Forms differ in where they round."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form == "round first":
        return weight * normed.to(x.dtype)
    by = 1.0 + weight.float() if form == "one more" else weight
    return (normed * by).to(x.dtype)
