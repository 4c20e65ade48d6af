"""Linear layers for GPUs in plain PyTorch: the order of codes and scales, and the specification of the product."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels.linear_quantized import reference as packed
from kvcli.kernels.linear_skinny.ptx import BOOKS

# `blocks`: of llama.cpp's formats, by the bits of a code as it lies here; iq4 and mxfp4 are blocks of looked up numbers
Kind = Literal["plain", "int8", "int4", "nf4", "blocks8", "blocks4", "iq4", "mxfp4"]
BLOCK = 64  # outputs of a program: two warps of 32
STEP = 64  # inputs of a step of kinds without groups
# Codes [N, K] have these axes: 0 block of 64 outputs, 1 warp, 2 and 3 eights of its outputs, 4 output of eight;
# 5 unit of 32 inputs, 6 eight of a unit, 7 half of an eight, 8 pair of a half, 9 input of a pair.
# In memory, units follow upon each other, and a lane (4, 6) has 16 contiguous bytes: four words of the axes 2 and 3.
# The last axes are the order in a word, for which kernels widen it with the fewest instructions.
ORDER: dict[Kind, tuple[int, ...]] = {
    **dict.fromkeys(("int8", "blocks8"), (0, 5, 7, 1, 4, 6, 2, 3, 9, 8)),
    **dict.fromkeys(("int4", "blocks4"), (0, 5, 1, 4, 6, 2, 3, 9, 7, 8)),
    **dict.fromkeys(("nf4", "iq4", "mxfp4"), (0, 5, 1, 4, 6, 2, 3, 7, 8, 9)),
}
EIGHT = ("int8", "blocks8")  # kinds of 8 bits a code
SPAN = 256  # inputs that share a scale whose groups have factors


@dataclass(frozen=True, slots=True)
class Weight:
    """Weight of one layer. `arrivals` counts the finished programs of a block, and is 0 between two products."""

    kind: Kind
    shape: tuple[int, int]  # N, K
    data: Tensor  # plain [N, K]; codes as int32 [N / 64, units, 64 lanes, 4 words], padded with 0
    arrivals: Tensor  # [2, N / 64] int32, for the first 32 rows and for the others
    # int8 [N]; int4 [K / g, N / 32, 8, 4, 2], scale and zero; nf4 [K / 64, N / 32, 8, 4]; blocks, float16:
    # [K / g, N / 32, 8, 4], or with 2 at the end: d, and `least` that is subtracted; with factors K / 256 of them
    scale: Tensor | None = None
    group: int = 0  # inputs that share a scale, or a factor of one
    factor: Tensor | None = None  # int8 [K / g, N / 32, 8, 4], or with 2 at the end: of d, and of `least`

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.data, self.arrivals, self.scale, self.factor) if t is not None)

    def of(self, tensors: Iterable[Tensor]) -> Weight:
        """Return a weight like this one of other tensors."""
        data, arrivals, scale, factor = (*tensors, None, None)[:4]
        assert data is not None
        assert arrivals is not None
        return replace(self, data=data, arrivals=arrivals, scale=scale, factor=factor)

    @staticmethod
    def merged(each: Sequence[Weight]) -> Weight | None:
        """Return weights of the same inputs as one, [sum of N, K]; None if they differ in kind, or end within a block
        of codes. Blocks of different formats become ones of 8 bits with factors for 16 inputs, of the same numbers, if
        all have factors."""
        if len({w.form for w in each}) > 1 and all(w.factor is not None for w in each):
            each = [as_eights(w) for w in each]
        first = each[0]
        if len({w.form for w in each}) > 1 or (first.kind != "plain" and any(w.shape[0] % BLOCK for w in each[:-1])):
            return None

        def joined(parts: list[Tensor | None], dim: int) -> Tensor | None:
            return None if parts[0] is None else torch.cat([part for part in parts if part is not None], dim=dim)

        n, data = sum(w.shape[0] for w in each), torch.cat([w.data for w in each])
        scale, factor = joined([w.scale for w in each], min(first.group, 1)), joined([w.factor for w in each], 1)
        of = no_arrivals(n, data.device)
        return replace(first, shape=(n, first.shape[1]), data=data, arrivals=of, scale=scale, factor=factor)

    @property
    def form(self) -> tuple[object, ...]:
        """All that weights must share to be one."""
        scales = [None if t is None else (t.dtype, t.dim()) for t in (self.scale, self.factor)]
        return (self.kind, self.shape[1], self.group, self.data.dtype, *scales)

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
    if kind in EIGHT:
        return codes.reshape(len(codes), -1, BLOCK, 16).view(torch.int32)
    nibbles = codes.reshape(len(codes), -1, BLOCK, 16, 2)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).view(torch.int32)


def codes(w: Weight, index: Tensor) -> Tensor:
    """Invert `arrange` for the rows `index` [R]: int8 or 0..15, [R, K]."""
    lane = (index % BLOCK // 32 * 32 + index % 8 * 4).unsqueeze(1) + torch.arange(4, device=index.device)
    of = w.data[(index // BLOCK).unsqueeze(1), :, lane, (index % 32 // 8).unsqueeze(1)]  # [R, 4, units], a word each
    held = of.transpose(1, 2).contiguous().view(torch.uint8)
    nibbles = held.view(torch.int8) if w.kind in EIGHT else torch.stack([held & 15, held >> 4], dim=-1)
    order = [axis for axis in ORDER[w.kind] if axis > 4]
    sizes = [{5: -1, 6: 4}.get(axis, 2) for axis in order]
    found = nibbles.reshape(len(index), *sizes).permute(0, *(1 + order.index(axis) for axis in range(5, 10)))
    return found.reshape(len(index), -1)[:, : w.shape[1]]


def arrange_scales(scale: Tensor) -> Tensor:
    """Arrange [groups, N, ...] -> [groups, N / 32, 8, 4, ...]: a lane loads those of its four outputs at once."""
    padded = functional.pad(scale, (*(0, 0) * (scale.dim() - 2), 0, -scale.shape[1] % BLOCK))
    return padded.unflatten(1, (-1, 4, 8)).transpose(2, 3).contiguous()


def scales(scale: Tensor | None, index: Tensor) -> Tensor:
    """Invert `arrange_scales` for the rows `index` [R]: [groups, R, ...]."""
    assert scale is not None
    return scale[:, index // 32, index % 8, index % 32 // 8]


def rows(w: Weight, index: Tensor) -> Tensor:
    """Dequantize the rows `index` [R] -> [R, K] float32 (float64 if scales are)."""
    if w.scale is None:
        return w.data[index].float()
    if w.kind == "int8":
        return packed.weight(8, 0, codes(w, index), w.scale[index])
    scale = scales(w.scale, index)
    if w.kind == "int4":
        return packed.weight(4, w.group, codes(w, index), scale)
    pairs = scale.float().reshape(len(scale), len(index), -1)  # [spans, R, 1 or 2]: d, least
    if w.factor is not None:
        factors = scales(w.factor, index).float()
        pairs = pairs.repeat_interleave(len(factors) // len(pairs), 0) * factors.reshape(len(factors), len(index), -1)
    d, *least = pairs.repeat_interleave(w.group, 0).unbind(2)  # [K, R] each
    wide = _unscaled(w, index) * d.T
    return wide - least[0].T if least else wide


def _unscaled(w: Weight, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers for which the codes of the rows `index` [R] stand, before scales: [R, K]."""
    q, is_pair = codes(w, index), w.scale is not None and w.scale.dim() > 4
    if w.kind in BOOKS:
        return book(w.kind, q.device, dtype)[q.long()]
    return q.to(dtype) - (8 if w.kind == "blocks4" and not is_pair else 0)


@cache  # a recorded pass must not copy it to the device
def book(kind: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers for which the codes of this kind stand; one that is not read if codes are numbers."""
    return torch.tensor(BOOKS.get(kind, (0,)), dtype=dtype, device=device)


def weight(w: Weight) -> Tensor:
    """Dequantize to a weight [N, K], float32 (float64 if scales are)."""
    return rows(w, torch.arange(w.shape[0], device=w.data.device))


def as_eights(w: Weight) -> Weight:
    """Return a weight of blocks with factors, of the same numbers, in 8 bits with pairs of factors for 16 inputs."""
    every = torch.arange(w.shape[0], device=w.data.device)
    assert w.scale is not None
    assert w.factor is not None
    q, is_pair = _unscaled(w, every, torch.int8), w.scale.dim() > 4
    scale, factor = (t if is_pair else torch.stack([t, torch.zeros_like(t)], dim=-1) for t in (w.scale, w.factor))
    factor = factor.repeat_interleave(w.group // 16, 0)
    return replace(w, kind="blocks8", data=arrange(q, "blocks8"), scale=scale, group=16, factor=factor)


def linear_skinny(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
    """Compute x [M, K] -> [M, N], summed in float32 and rounded once."""
    wide = weight(w)
    return functional.linear(x.to(wide.dtype), wide, None if bias is None else bias.to(wide.dtype)).to(x.dtype)
