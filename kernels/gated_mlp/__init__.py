"""Gated MLP of a decoder layer, down(act(gate(x)) * up(x)), in one call on a CPU (arXiv 2002.05202).

x [..., E] -> [..., E] in bf16 or float32, with weights in the layout of `kernels.linear` or `kernels.linear_quantized`.
Products and roundings equal those of the separate modules. e^x and tanh are implemented here, so an activation differs
by at most one rounding.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels.gated_mlp.product import Product

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")  # in the order of native/c/layer.c


class Mlp(ctypes.Structure):
    """The struct of native/c/layer.c. It stores addresses, so it must not outlive the weights."""

    _fields_ = [
        ("gate", Product),
        ("up", Product),
        ("down", Product),
        ("act", ctypes.c_int32),
        ("is_wide", ctypes.c_int32),
    ]


def gated_mlp(x: Tensor, mlp: Mlp, *, level: str | None = None) -> Tensor:
    """Compute x [..., E] in the weights' dtype -> [..., E]. `level`: a lesser kind of CPU than the best available."""
    functions = built.native(level)
    assert functions is not None
    if x.shape[-1] != mlp.down.N or x.dtype != (torch.float32 if mlp.is_wide else torch.bfloat16):
        raise ValueError(f"rows of {x.shape[-1]} {x.dtype} for an MLP of {mlp.down.N}")
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], mlp.down.N)
    functions.mlp(ctypes.addressof(mlp), x.data_ptr(), y.data_ptr(), x.numel() // x.shape[-1])
    return y
