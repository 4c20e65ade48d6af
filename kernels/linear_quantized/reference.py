"""Quantized linear layers in plain PyTorch: the specification of rounding, packing and product."""

from __future__ import annotations

import torch
from torch import Tensor


def round8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [N, K] -> q [N, K] int8 and scale [N]: the largest weight of a row becomes 127."""
    scale = (weight.abs().amax(dim=1).float() / 127).clamp_min(1e-12).to(weight.dtype)  # [N]
    q = (weight.float() / scale.float().unsqueeze(1)).round_().clamp_(-127, 127)
    return q.to(torch.int8), scale


def round4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize [N, K] -> q [N, K] uint8 in 0..15 and (scale, zero) [K // g, N, 2]: a group's ends become 0 and 15."""
    n, k = weight.shape
    w = weight.float().view(n, k // group, group)
    low, high = w.amin(dim=2), w.amax(dim=2)  # [N, K // g]
    scale = ((high - low) / 15).clamp_min(1e-8)
    pairs = torch.stack([scale, low + 8 * scale], dim=2).to(weight.dtype)  # [N, K // g, 2]
    scale, zero = pairs.float().unsqueeze(2).unbind(3)  # as stored, so that q corrects for their rounding
    q = ((w - zero) / scale).round_().add_(8).clamp_(0, 15)
    return q.to(torch.uint8).view(n, k), pairs.transpose(0, 1).contiguous()


def pack4(q: Tensor) -> Tensor:
    """Pack [N, K] in 0..15 -> [N, K // 2], low nibble first."""
    return q[:, 0::2] | (q[:, 1::2] << 4)


def unpack4(data: Tensor) -> Tensor:
    return torch.stack([data & 15, data >> 4], dim=2).flatten(1)


def weight(bits: int, group: int, q: Tensor, scale: Tensor) -> Tensor:
    """Dequantize the codes q [N, K] -> weight [N, K], float32 (float64 with float64 scales)."""
    exact = torch.promote_types(scale.dtype, torch.float32)
    if bits == 8:
        return q.to(exact) * scale.to(exact).unsqueeze(1)
    s, zero = scale.to(exact).repeat_interleave(group, dim=0).unbind(2)  # [K, N] each
    return (q.to(exact) - 8) * s.T + zero.T


def linear(x: Tensor, bits: int, group: int, data: Tensor, scale: Tensor) -> Tensor:
    """Compute x [M, K] -> [M, N], summed in float32."""
    w = weight(bits, group, data if bits == 8 else unpack4(data), scale)
    return (x.to(w.dtype) @ w.T).to(x.dtype)
