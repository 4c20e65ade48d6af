"""A decoder layer of the common form on a CPU in two calls, one before its attention and one after it.

x -> norm -> q, k, v -> rotary embedding -> attention -> o, + x -> norm -> gated MLP, +: bit for bit what its modules
give one by one, once norms, products and MLP are native. There may be norms of the heads, before they turn (Qwen 3),
and of what attention and MLP give (Gemma 2). reference.py has it in PyTorch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels.gated_mlp import Mlp
from kvcli.kernels.gated_mlp.product import Product
from kvcli.kernels.rms_norm import Norm


class Layer(ctypes.Structure):
    """As in native/c/layer.c; holds addresses, so it lives no longer than the weights."""

    _fields_ = [
        *((name, Norm) for name in ("first", "second")),
        *((name, Norm) for name in ("of_q", "of_k", "of_attention", "of_mlp")),  # the first two of D numbers; or empty
        *((name, Product) for name in ("q", "k", "v", "o")),
        ("mlp", Mlp),
        ("D", ctypes.c_int64),
    ]


def before(
    layer: Layer, x: Tensor, cos: Tensor | None, sin: Tensor | None, *, level: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, E] -> q [H, N, D], k, v [K, N, D], views of [N, .., D]; cos, sin [N, R], or None where nothing turns."""
    functions = built.native(level)
    assert functions is not None
    n, d, x = x.shape[0], layer.D, x.contiguous()
    q, k, v = (x.new_empty(n, product.N // d, d) for product in (layer.q, layer.k, layer.v))
    turns: tuple[int | None, int | None] = None, None
    r = 0
    if cos is not None and sin is not None:
        cos, sin, r = cos.contiguous(), sin.contiguous(), cos.shape[1]
        turns = cos.data_ptr(), sin.data_ptr()
    functions.layer_before(
        ctypes.addressof(layer), x.data_ptr(), *turns, q.data_ptr(), k.data_ptr(), v.data_ptr(), n, r
    )
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


def after(layer: Layer, x: Tensor, attended: Tensor, *, level: str | None = None) -> Tensor:
    """x [N, E], what attention gave [N, H, D] -> [N, E]."""
    functions = built.native(level)
    assert functions is not None
    x, attended = x.contiguous(), attended.contiguous()
    y = torch.empty_like(x)
    functions.layer_after(ctypes.addressof(layer), x.data_ptr(), attended.data_ptr(), y.data_ptr(), x.shape[0])
    return y
