"""Gated MLP in plain PyTorch: the specification of `gated_mlp`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
}


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Compute x [..., E], gate and up [I, E], down [E, I] -> [..., E]."""
    act = ACTIVATIONS[activation](functional.linear(x, gate))
    return functional.linear(act * functional.linear(x, up), down)
