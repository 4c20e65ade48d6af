"""A decoder layer of the common form on a CPU in two calls, one before its attention and one after it.

x -> norm -> q, k, v -> rotary embedding -> attention -> o, + x -> norm -> gated MLP, +: bit for bit what its modules
give one by one, once norms, products and MLP are native. There may be norms of the heads, before they turn (Qwen 3),
and of what attention and MLP give (Gemma 2). reference.py has it in PyTorch.
"""

from __future__ import annotations

import ctypes
from functools import cached_property

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

    @cached_property
    def known(self) -> tuple[int, int, list[int]]:
        """Its address, D, and the heads of q, k and v: each question to a structure makes another one."""
        return ctypes.addressof(self), self.D, [product.N // self.D for product in (self.q, self.k, self.v)]


def before(
    layer: Layer, x: Tensor, cos: Tensor | None, sin: Tensor | None, *, level: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, E] -> q [H, N, D], k, v [K, N, D], views of [N, .., D]; cos, sin [N, R], or None where nothing turns."""
    functions = built.native(level)
    assert functions is not None
    (at, d, heads), n, x = layer.known, x.shape[0], x.contiguous()
    q, k, v = [x.new_empty(n, h, d) for h in heads]
    cos_at = sin_at = None
    r = 0
    if cos is not None and sin is not None:
        cos, sin, r = cos.contiguous(), sin.contiguous(), cos.shape[1]
        cos_at, sin_at = cos.data_ptr(), sin.data_ptr()
    functions.layer_before(at, x.data_ptr(), cos_at, sin_at, q.data_ptr(), k.data_ptr(), v.data_ptr(), n, r)
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


def after(layer: Layer, x: Tensor, attended: Tensor, *, level: str | None = None) -> Tensor:
    """x [N, E], what attention gave [N, H, D] -> [N, E]."""
    functions = built.native(level)
    assert functions is not None
    x, attended = x.contiguous(), attended.contiguous()
    y = torch.empty_like(x)
    functions.layer_after(layer.known[0], x.data_ptr(), attended.data_ptr(), y.data_ptr(), x.shape[0])
    return y
