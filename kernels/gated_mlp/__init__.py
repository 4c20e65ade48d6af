"""The gated MLP of a decoder layer, down(act(gate(x)) * up(x)), in one call on a CPU (arXiv 2002.05202).

x [..., E] -> [..., E] in bf16 or float32, with weights as `kernels.linear` or `kernels.linear_quantized` lays them out.
Products and roundings are those of the modules one by one; e^x and tanh are ours, so that an activation is a rounding
off at most.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels.gated_mlp.product import Product

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")  # as native/c/layer.c counts them


class Mlp(ctypes.Structure):
    """As in native/c/layer.c; holds addresses, so it lives no longer than the weights."""

    _fields_ = [
        ("gate", Product),
        ("up", Product),
        ("down", Product),
        ("act", ctypes.c_int32),
        ("is_wide", ctypes.c_int32),
    ]


def gated_mlp(x: Tensor, mlp: Mlp, *, level: str | None = None) -> Tensor:
    """x [..., E] in the weights' type -> [..., E]. `level`: another kind of CPU than the best there is."""
    functions = built.native(level)
    assert functions is not None
    if x.shape[-1] != mlp.down.N or x.dtype != (torch.float32 if mlp.is_wide else torch.bfloat16):
        raise ValueError(f"rows of {x.shape[-1]} {x.dtype} for an MLP of {mlp.down.N}")
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], mlp.down.N)
    functions.mlp(ctypes.addressof(mlp), x.data_ptr(), y.data_ptr(), x.numel() // x.shape[-1])
    return y
