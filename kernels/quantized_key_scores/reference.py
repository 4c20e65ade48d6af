"""Scores of quantized keys in plain PyTorch, and the packing of two-bit codes."""

from __future__ import annotations

import torch
from torch import Tensor


def code_scores(rows: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Score rows [K, R, D], codes [K, S, D], scale [K, S] -> [K, R, S]."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return (rows.to(wide) @ codes.to(wide).transpose(1, 2)) * scale.to(wide).unsqueeze(1)


def pack2(codes: Tensor) -> Tensor:
    """Pack [.., D] in 0..3 -> [.., D / 4, rounded up] uint8. Byte i holds channels i, i + n, i + 2 n, i + 3 n of n
    bytes, so that each quarter of the channels is unpacked with one shift."""
    n = -(-codes.shape[-1] // 4)
    planes = torch.nn.functional.pad(codes.to(torch.uint8), (0, 4 * n - codes.shape[-1])).unflatten(-1, (4, n))
    return planes[..., 0, :] | planes[..., 1, :] << 2 | planes[..., 2, :] << 4 | planes[..., 3, :] << 6


def unpack2(data: Tensor, d: int) -> Tensor:
    """Unpack [.., n] uint8 -> [.., D] int8 of -3, -1, 1, 3."""
    n = data.shape[-1]
    out = torch.empty(*data.shape[:-1], 4 * n, dtype=torch.int8, device=data.device)
    for i in range(4):
        out[..., i * n : (i + 1) * n] = (data >> 2 * i & 3).view(torch.int8)
    return out.mul_(2).sub_(3)[..., :d]
