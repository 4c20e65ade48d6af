"""Linear layers for GPUs in plain PyTorch: the order of codes and scales, and the specification of the product."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels.linear_quantized import reference as packed
from kvcli.kernels.linear_skinny.ptx import NF4

Kind = Literal["plain", "int8", "int4", "nf4"]
BLOCK = 64  # outputs of a program: two warps of 32
STEP = 64  # inputs of a step of kinds without groups
# Codes [N, K] have these axes: 0 block of 64 outputs, 1 warp, 2 and 3 eights of its outputs, 4 output of eight;
# 5 unit of 32 inputs, 6 eight of a unit, 7 half of an eight, 8 pair of a half, 9 input of a pair.
# In memory, units follow upon each other, and a lane (4, 6) has 16 contiguous bytes: four words of the axes 2 and 3.
# The last axes are the order in a word, for which kernels widen it with the fewest instructions.
ORDER: dict[Kind, tuple[int, ...]] = {
    "int8": (0, 5, 7, 1, 4, 6, 2, 3, 9, 8),
    "int4": (0, 5, 1, 4, 6, 2, 3, 9, 7, 8),
    "nf4": (0, 5, 1, 4, 6, 2, 3, 7, 8, 9),
}


@dataclass(frozen=True, slots=True)
class Weight:
    """Weight of one layer. `arrivals` counts the finished programs of a block, and is 0 between two products."""

    kind: Kind
    shape: tuple[int, int]  # N, K
    data: Tensor  # plain [N, K]; codes as int32 [N / 64, units, 64 lanes, 4 words], padded with 0
    arrivals: Tensor  # [2, N / 64] int32, for the first 32 rows and for the others
    scale: Tensor | None = None  # int8 [N]; int4 [K / g, N / 32, 8, 4, 2], scale and zero; nf4 [K / 64, N / 32, 8, 4]
    group: int = 0  # inputs that share a scale

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data, self.arrivals) if self.scale is None else (self.data, self.arrivals, self.scale)

    def of(self, tensors: Iterable[Tensor]) -> Weight:
        """Return a weight like this one of other tensors."""
        data, arrivals, *scale = tensors
        return replace(self, data=data, arrivals=arrivals, scale=next(iter(scale), None))

    @staticmethod
    def merged(each: Sequence[Weight]) -> Weight | None:
        """Return weights of the same inputs as one, [sum of N, K]; None if they differ in kind, or end within a block
        of codes."""
        first = each[0]
        alike = {(w.kind, w.shape[1], w.group, w.data.dtype, None if w.scale is None else w.scale.dtype) for w in each}
        if len(alike) > 1 or (first.kind != "plain" and any(w.shape[0] % BLOCK for w in each[:-1])):
            return None
        scales = [w.scale for w in each if w.scale is not None]
        scale = torch.cat(scales, dim=1 if first.group else 0) if scales else None
        n, data = sum(w.shape[0] for w in each), torch.cat([w.data for w in each])
        return replace(first, shape=(n, first.shape[1]), data=data, arrivals=no_arrivals(n, data.device), scale=scale)

    @property
    def step(self) -> int:
        """Inputs of a step of the kernel."""
        return self.group or STEP


def no_arrivals(n: int, device: torch.device) -> Tensor:
    return torch.zeros(2, -(-n // BLOCK), dtype=torch.int32, device=device)


def arrange(q: Tensor, kind: Kind) -> Tensor:
    """Arrange codes [N, K], int8 or 0..15, as lanes load them -> int32 [N / 64, units, 64, 4]."""
    n, k = q.shape
    q = functional.pad(q, (0, -k % STEP if kind == "int8" else 0, 0, -n % BLOCK)).view(torch.uint8)
    codes = q.view(-1, 2, 2, 2, 8, q.shape[1] // 32, 4, 2, 2, 2).permute(ORDER[kind])
    if kind == "int8":
        return codes.reshape(len(codes), -1, BLOCK, 16).view(torch.int32)
    nibbles = codes.reshape(len(codes), -1, BLOCK, 16, 2)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).view(torch.int32)


def codes(w: Weight) -> Tensor:
    """Invert `arrange`: int8 or 0..15, [N, K]."""
    n, k = w.shape
    held = w.data.view(torch.uint8)
    nibbles = held.view(torch.int8) if w.kind == "int8" else torch.stack([held & 15, held >> 4], dim=-1)
    order = ORDER[w.kind]
    sizes = [(len(w.data), 2, 2, 2, 8, -1, 4, 2, 2, 2)[axis] for axis in order]
    found = nibbles.reshape(sizes).permute([order.index(axis) for axis in range(10)])
    return found.reshape(len(w.data) * BLOCK, -1)[:n, :k]


def arrange_scales(scale: Tensor) -> Tensor:
    """Arrange [groups, N, ...] -> [groups, N / 32, 8, 4, ...]: a lane loads those of its four outputs at once."""
    padded = functional.pad(scale, (*(0, 0) * (scale.dim() - 2), 0, -scale.shape[1] % BLOCK))
    return padded.unflatten(1, (-1, 4, 8)).transpose(2, 3).contiguous()


def scales(w: Weight) -> Tensor:
    """Invert `arrange_scales`: [groups, N, ...]."""
    assert w.scale is not None
    return w.scale.transpose(2, 3).flatten(1, 3)[:, : w.shape[0]]


def weight(w: Weight) -> Tensor:
    """Dequantize to a weight [N, K], float32 (float64 if scales are)."""
    if w.scale is None:
        return w.data.float()
    if w.kind == "int8":
        return packed.weight(8, 0, codes(w), w.scale)
    if w.kind == "int4":
        return packed.weight(4, w.group, codes(w), scales(w))
    of_input = scales(w).float().T.repeat_interleave(w.group, 1)
    return torch.tensor(NF4, device=w.data.device)[codes(w).long()] * of_input


def linear_skinny(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    """Compute x [M, K] -> [M, N], summed in float32 and rounded once."""
    wide = weight(w)
    return functional.linear(x.to(wide.dtype), wide, None if bias is None else bias.to(wide.dtype)).to(x.dtype)
