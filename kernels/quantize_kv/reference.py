"""Quantization of keys and values in plain PyTorch: the specification of quantize_kv.

A group of numbers between `low` and `high` becomes codes 0 .. 2^bits - 1 with zero = low and scale = (high - low) /
(2^bits - 1). At 8 bits one scale per slot maps its largest magnitude to 127, and there is no zero. Split 8-bit codes
have groups, scales and zeros as 4-bit codes do.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 65504.0  # the largest float16
TINIEST = 2.0**-24  # of float16; a group of equal numbers still has a scale


def round_scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [S, D] -> codes int8 [S, D] and scale [S]."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (x.abs().amax(1) / 127).clamp(TINIEST, LARGEST).to(torch.float16)
    return (x / scale.to(x.dtype).unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8), scale


def round_range(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups along `dim` of x -> codes uint8 like x, scale and zero with that dimension 1."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    levels = (1 << bits) - 1
    zero = x.amin(dim, keepdim=True).clamp(-LARGEST, LARGEST).to(torch.float16)
    # against the zero as stored, so that the range ends at `high` in spite of its rounding
    low = zero.to(x.dtype)
    scale = ((x.amax(dim, keepdim=True) - low) / levels).clamp_(TINIEST, LARGEST).to(torch.float16)
    codes = (x - low).div_(scale.to(x.dtype)).round_().clamp_(0, levels)
    return codes.to(torch.uint8), scale, zero


def round_halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize groups along `dim` of x -> upper and lower codes 0 .. 15 like x, scale and zero with that dimension 1.

    A number is zero + (upper + (lower - 7.5) / 16) * scale: the upper code alone gives the middle of its range.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    zero = (low + (high - low) * (7.5 / 255)).clamp(-LARGEST, LARGEST).to(torch.float16)
    # wide enough to cover both ends, in spite of the rounding of zero
    wide = torch.maximum((high - zero.to(x.dtype)) / 247.5, (zero.to(x.dtype) - low) / 7.5) * 16
    scale = wide.clamp(16 * TINIEST, LARGEST).to(torch.float16)
    codes = ((x - zero.to(x.dtype)) / scale.to(x.dtype) * 16 + 7.5).round_().clamp_(0, 255).to(torch.uint8)
    return codes >> 4, codes & 15, scale, zero


def refined(codes: Tensor, fine: Tensor | None, bits: int, exact: torch.dtype) -> Tensor:
    """Return one code per number; with the lower halves, a value between two steps."""
    q = spread(codes, bits).to(exact)
    return q if fine is None else q + (spread(fine, 4).to(exact) - 7.5) / 16


def squeeze(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [.., m] uint8 -> [.., m * bits / 8]: neighbours in one byte, the first in the lowest bits."""
    while bits < 8:
        codes, bits = codes[..., ::2] | codes[..., 1::2] << bits, 2 * bits
    return codes


def spread(codes: Tensor, bits: int) -> Tensor:
    """Invert `squeeze`."""
    half = 4
    while half >= bits:
        codes = torch.stack([codes & (1 << half) - 1, codes >> half], -1).flatten(-2)
        half //= 2
    return codes


def keys_of(
    bits: int, codes: Tensor, scale: Tensor | None, zero: Tensor | None, dtype: torch.dtype, fine: Tensor | None = None
) -> Tensor:
    """Dequantize to keys [S, D]."""
    if scale is None:
        return codes.to(dtype)
    exact = torch.promote_types(dtype, torch.float32)
    if zero is None:
        return (codes.to(exact) * scale.to(exact).unsqueeze(1)).to(dtype)
    q = refined(codes, fine, bits, exact)  # [S, D]
    q = q.view(scale.shape[0], q.shape[0] // max(1, scale.shape[0]), q.shape[1])  # [S / g, g, D]
    return (zero.to(exact).unsqueeze(1) + q * scale.to(exact).unsqueeze(1)).flatten(0, 1).to(dtype)


def values_of(
    bits: int, codes: Tensor, scale: Tensor | None, zero: Tensor | None, dtype: torch.dtype, fine: Tensor | None = None
) -> Tensor:
    """Dequantize to values [S, D]."""
    if scale is None:
        return codes.to(dtype)
    exact = torch.promote_types(dtype, torch.float32)
    if zero is None:
        return (codes.T.contiguous().to(exact) * scale.to(exact).unsqueeze(1)).to(dtype)
    q = refined(codes, fine, bits, exact)
    q = q.view(*scale.shape, q.shape[1] // scale.shape[1])  # [S, D / c, c]
    return (zero.to(exact).unsqueeze(2) + q * scale.to(exact).unsqueeze(2)).flatten(1).to(dtype)


def width_of(channels: int, group: int) -> int:
    """Return the channels of a value that share a scale: the most that divide all channels, at most `group`."""
    return next(c for c in range(min(channels, group), 0, -1) if channels % c == 0)


def hadamard(n: int, like: Tensor) -> Tensor:
    """Return the Hadamard matrix [n, n], symmetric and orthogonal, its own inverse; n a power of two."""
    assert n & (n - 1) == 0, "Sylvester's matrices have a power of two rows"
    h = like.new_ones(1, 1, dtype=torch.promote_types(like.dtype, torch.float32))
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h * n**-0.5
