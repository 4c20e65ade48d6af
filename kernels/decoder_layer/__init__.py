"""Standard decoder layer on a CPU in two calls, one before its attention and one after it.

x -> norm -> q, k, v -> rotary embedding -> attention -> o, + x -> norm -> gated MLP, +: bit for bit equal to its
separate modules, if norms, products and MLP are native. Optional norms apply to the heads before rotation (Qwen 3), and
to the outputs of attention and MLP (Gemma 2). reference.py has the layer in PyTorch.
"""

from __future__ import annotations

import ctypes
from functools import cached_property

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels.gated_mlp import Mlp, Product
from kvcli.kernels.rms_norm import Norm


class Layer(ctypes.Structure):
    """The struct of native/c/layer.c. It stores addresses, so it must not outlive the weights."""

    _fields_ = [
        *((name, Norm) for name in ("first", "second")),
        *((name, Norm) for name in ("of_q", "of_k", "of_attention", "of_mlp")),  # the first two of size D; or empty
        *((name, Product) for name in ("q", "k", "v", "o")),
        ("mlp", Mlp),
        ("D", ctypes.c_int64),
    ]

    @cached_property
    def known(self) -> tuple[int, int, list[int]]:
        """The address, D, and the heads of q, k and v. Cached, because each access to a nested struct creates one."""
        return ctypes.addressof(self), self.D, [product.N // self.D for product in (self.q, self.k, self.v)]


def before(
    layer: Layer, x: Tensor, cos: Tensor | None, sin: Tensor | None, *, level: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute x [N, E] -> q [H, N, D], k, v [K, N, D], views of [N, .., D]; cos, sin [N, R]; None = no rotation."""
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
    """Compute x [N, E], attention output [N, H, D] -> [N, E]."""
    functions = built.native(level)
    assert functions is not None
    x, attended = x.contiguous(), attended.contiguous()
    y = torch.empty_like(x)
    functions.layer_after(layer.known[0], x.data_ptr(), attended.data_ptr(), y.data_ptr(), x.shape[0])
    return y
