"""Decoder layer without its attention, in plain PyTorch: the specification of `before` and `after`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Op = Callable[[Tensor], Tensor]


def before(
    x: Tensor, norm: Op, q: Op, k: Op, v: Op, of_q: Op, of_k: Op, cos: Tensor, sin: Tensor, d: int
) -> list[Tensor]:
    """Compute x [N, E] -> q [H, N, D], k and v [K, N, D], rotated over the first R channels; cos, sin [N, R]."""
    normed = norm(x)
    heads = [make(normed).view(x.shape[0], -1, d).transpose(0, 1) for make in (q, k, v)]
    return [_turned(of_q(heads[0]), cos, sin), _turned(of_k(heads[1]), cos, sin), heads[2]]


def after(x: Tensor, attended: Tensor, o: Op, of_attention: Op, norm: Op, mlp: Op, of_mlp: Op) -> Tensor:
    """Compute x [N, E], attention output [N, H, D] -> [N, E]."""
    middle = x + of_attention(o(attended.flatten(1)))
    return middle + of_mlp(mlp(norm(middle)))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning, still = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
    a, b = turning.chunk(2, -1)
    return torch.cat((turning * cos + torch.cat((-b, a), -1) * sin, still), -1)
