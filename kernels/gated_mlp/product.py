"""One linear layer as an argument of native calls that compute several products."""

from __future__ import annotations

import ctypes

from torch import Tensor, dtype, nn

from kvcli.kernels.linear.module import NativeLinear
from kvcli.kernels.linear_quantized import panels
from kvcli.kernels.linear_quantized.module import PackedLinear


class Product(ctypes.Structure):
    """The struct of native/c/layer.c. It stores addresses, so it must not outlive the layer's tensors."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("w", "scale", "bias")),
        *((name, ctypes.c_int64) for name in ("N", "K", "bits", "group")),
    ]


def type_of(layer: nn.Module) -> dtype | None:
    """Return the dtype of a linear layer's inputs; None if the module is no linear layer, or has no native product."""
    found = None
    if isinstance(layer, NativeLinear):
        found = layer.dtype
    elif isinstance(layer, PackedLinear) and layer.is_native and panels.serves(layer.scale.dtype):
        found = layer.scale.dtype
    return found if found is None or layer.bias is None or layer.bias.dtype == found else None


def product_of(layer: nn.Module) -> tuple[Product, list[Tensor | None]]:
    """Return the struct for a layer that has a `type_of`, and the tensors that own its memory."""
    keeps: list[Tensor | None]
    packing: tuple[int, int]
    if isinstance(layer, PackedLinear):
        keeps, packing = [layer.data, layer.scale, layer.bias], (layer.bits, layer.group)
    else:
        assert isinstance(layer, NativeLinear)
        keeps, packing = [layer.packed, None, layer.bias], (0, 0)
    at = (None if t is None else t.data_ptr() for t in keeps)
    return Product(*at, layer.out_features, layer.in_features, *packing), keeps
