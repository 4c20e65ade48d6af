"""Linear layers for GPUs in plain PyTorch: the order of codes, and the specification of the product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels.linear_quantized import reference as packed
from kvcli.kernels.linear_skinny.ptx import NF4

Kind = Literal["plain", "int8", "int4", "nf4"]


@dataclass(frozen=True, slots=True)
class Weight:
    """Weight of one layer."""

    kind: Kind
    shape: tuple[int, int]  # N, K
    data: Tensor  # plain [N, K]; int8 [N, K]; 4 bits [N, ceil(K / step) * step // 2] uint8
    scale: Tensor | None = None  # int8: [N]; int4: [K // g, N, 2], scale and zero; nf4: [ceil(K / step), N, 2] float16
    group: int = 0  # inputs that share a scale

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,) if self.scale is None else (self.data, self.scale)

    @property
    def step(self) -> int:
        """Inputs per step of the kernel: two halves, each with one scale."""
        return 64 if self.group == 32 else 128


def arrange(q: Tensor, step: int) -> Tensor:
    """Arrange codes [N, K] in 0..15 -> bytes [N, ceil(K / step) * step // 2].

    A byte has a code of the first half of a step in its low bits, and the code half a step later in its high bits, so
    that each half of the bytes is multiplied with neighbouring inputs. Missing codes of the last step are 0.
    """
    n, k = q.shape
    low, high = functional.pad(q, (0, -k % step)).view(n, -1, 2, step // 2).unbind(2)
    return (low | high << 4).flatten(1)


def codes(data: Tensor, k: int, step: int) -> Tensor:
    """Invert `arrange`."""
    n, half = data.shape[0], data.view(data.shape[0], -1, step // 2)
    return torch.stack([half & 15, half >> 4], dim=2).view(n, -1)[:, :k]


def weight(w: Weight) -> Tensor:
    """Dequantize to a weight [N, K], float32 (float64 if scales are)."""
    if w.scale is None:
        return w.data.float()
    if w.kind == "int8":
        return packed.weight(8, 0, w.data, w.scale)
    q = codes(w.data, w.shape[1], w.step)
    if w.kind == "int4":
        return packed.weight(4, w.group, q, w.scale)
    scale = w.scale.float().transpose(0, 1).flatten(1)  # [N, K // group], and padding of the last step
    return torch.tensor(NF4, device=q.device)[q.long()] * scale.repeat_interleave(w.group, 1)[:, : w.shape[1]]


def linear_skinny(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    """Compute x [M, K] -> [M, N], summed in float32 and rounded once."""
    wide = weight(w)
    return functional.linear(x.to(wide.dtype), wide, None if bias is None else bias.to(wide.dtype)).to(x.dtype)
