"""Quantized linear layers on the CPU by torch: its quantized product for few rows, dequantization for many.

The quantized product reads 4 to 2 times fewer bytes, which determines the time for few rows. It does not use the matrix
units, so for many rows it is faster to dequantize a part of the weight and multiply with that. The crossover was
measured by tests/bench/linear_quantized.py.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvcli.kernels.invariant_activations import multiplies

MANY = {8: 16, 4: 64}  # rows from which dequantization is faster
_STRETCH = 1 << 21  # weights dequantized at a time: 4 MiB in bfloat16, small enough to stay in cache


def linear(x: Tensor, bits: int, group: int, data: Tensor, scale: Tensor) -> Tensor:
    """x [M, K] -> [M, N]."""
    x = x.contiguous()
    if bits == 8 and x.shape[0] >= MANY[8]:
        return _many8(x, data, scale)
    if bits == 8:
        y: Tensor = torch.ops.aten._weight_int8pack_mm(x, data, scale)
        return y
    if x.shape[0] >= MANY[4] and _block() > 0:
        return _many4(x, group, data, scale)
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, data, group, scale)
    return y


def pack4(q: Tensor) -> Tensor:
    """Arrange [N, K] in 0..15 -> [N, K // 2] in the order of torch's CPU kernel, which varies by instruction set."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.to(torch.int32), 2)
    return packed


def unpack4(data: Tensor, block: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """Invert `pack4`, minus 8 and transposed: [N, K // 2] -> [K, N]."""
    n, k = data.shape[0], data.shape[1] * 2
    out = torch.empty(k, n, dtype=dtype)
    whole = n - n % block
    for a, b, size in ((0, whole, block), (whole, n, n - whole)):
        if a == b:
            continue
        byte = data[a:b].view((b - a) // size, k, size // 2)
        low, high, order = (byte & 15).view(torch.int8).sub_(8), (byte >> 4).view(torch.int8).sub_(8), _order(size)
        into = out[:, a:b].view(k, -1, size).transpose(0, 1)  # [blocks, K, size]
        if order is None:
            into[..., : size // 2], into[..., size // 2 :] = low, high
        else:
            into[..., order] = torch.cat([low, high], dim=2).to(dtype)
    return out


def explain() -> str:
    order = f"unpacked from {MANY[4]} rows on" if _block() else "never unpacked: this CPU's packing order is not known"
    return f"int8: torch packed product, unpacked from {MANY[8]} rows on; int4: torch packed product, {order}"


def _many8(x: Tensor, data: Tensor, scale: Tensor) -> Tensor:
    n, k = data.shape
    y, wide = x.new_empty(x.shape[0], n), _wide(x)
    stretch = max(1, _STRETCH // k)
    for a in range(0, n, stretch):
        # -127..127 is exact in every float type; scaling the result avoids rounding weights twice
        y[:, a : a + stretch] = torch.nn.functional.linear(wide, data[a : a + stretch].to(wide.dtype))
    return y.mul_(scale)


def _many4(x: Tensor, group: int, data: Tensor, scale: Tensor) -> Tensor:
    n, k = data.shape[0], data.shape[1] * 2
    y, wide = x.new_empty(x.shape[0], n), _wide(x)
    block = _block()
    # [K // g, 1, N] each; strided operands cost 3x
    s, zero = scale.to(wide.dtype).permute(2, 0, 1).unsqueeze(2).contiguous()
    stretch = max(block, _STRETCH // k // block * block)
    for a in range(0, n, stretch):
        b = min(a + stretch, n)
        w = unpack4(data[a:b], block, wide.dtype).view(k // group, group, b - a)
        w = torch.addcmul(zero[..., a:b], w, s[..., a:b])
        y[:, a:b] = wide @ w.view(k, b - a)
    return y


def _wide(x: Tensor) -> Tensor:
    """Return x in a dtype that this CPU multiplies."""
    return x if multiplies(x.dtype) else x.float()


@cache
def _block() -> int:
    """Return the outputs that this CPU's packing interleaves; 0 if `unpack4` does not reproduce it."""
    q = torch.randint(0, 16, (176, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for block in (64, 32):
        if torch.equal(unpack4(pack4(q), block).T + 8, q.to(torch.int8)):
            return block
    return 0


@cache
def _order(size: int) -> Tensor | None:
    """Return the output of each nibble of a block, low ones first, found by packing; None = in order."""
    outputs = torch.arange(size).unsqueeze(1).expand(size, 2)
    seen = torch.zeros(size, dtype=torch.int64)
    for shift in (0, 4):
        byte = pack4(outputs >> shift & 15).view(2, size // 2)[0]
        seen += torch.cat([byte & 15, byte >> 4]).to(torch.int64) << shift
    return None if torch.equal(seen, torch.arange(size)) else seen
