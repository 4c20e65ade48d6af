"""The gated MLP of a decoder layer, down(act(gate(x)) * up(x)), in one call on a CPU (arXiv 2002.05202).

x [..., E] -> [..., E] in bf16 or float32, with weights as `kernels.linear` packs them. Products and roundings are those
of the modules one by one; e^x is ours and tanh is ours, so that an activation is a rounding off at most.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from kvcli.kernels import native as built

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")  # as native/c/layer.c counts them


class Product(ctypes.Structure):
    """As in native/c/layer.c; holds addresses, so it lives no longer than the weights."""

    _fields_ = [("w", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("N", ctypes.c_int64), ("S", ctypes.c_int64)]


class Mlp(ctypes.Structure):
    """As in native/c/layer.c."""

    _fields_ = [
        ("gate", Product),
        ("up", Product),
        ("down", Product),
        ("act", ctypes.c_int32),
        ("is_wide", ctypes.c_int32),
    ]


def product_of(packed: Tensor, bias: Tensor | None, n: int) -> Product:
    """A weight from `kernels.linear.pack` with n outputs."""
    return Product(packed.data_ptr(), None if bias is None else bias.data_ptr(), n, packed.shape[1])


def gated_mlp(x: Tensor, mlp: Mlp, *, level: str | None = None) -> Tensor:
    """x [..., E] in the weights' type -> [..., E]. `level`: another kind of CPU than the best there is."""
    functions = built.native(level)
    assert functions is not None
    if x.shape[-1] * x.itemsize != mlp.gate.S * 4:
        raise ValueError(f"{x.shape[-1]} inputs in {x.dtype} for a weight of {mlp.gate.S * 4} bytes a row")
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], mlp.down.N)
    functions.mlp(ctypes.addressof(mlp), x.data_ptr(), y.data_ptr(), x.numel() // x.shape[-1])
    return y
