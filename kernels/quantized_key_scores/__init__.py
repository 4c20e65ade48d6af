"""Scores of quantized keys: a sparse attention index reads them to select the keys to read in full precision.

rows [K, R, D]; codes [K, S, D] int8; scale [K, S]: the key of a slot is about scale * code -> q . key [K, R, S], in
float32, or float64 for float64 rows. Two-bit codes represent -3, -1, 1, 3 and are packed four to a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels import triton_support
from kvcli.kernels.quantized_key_scores.reference import pack2, unpack2

BLOCK = 2048  # slots converted at a time, which stay in cache: torch's int8 product takes ten times as long in float32


def code_scores(rows: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Score every row with every slot of its KV head."""
    if triton_support.serves(rows, scale):
        from kvcli.kernels.quantized_key_scores import fused  # imports Triton, which is not installed everywhere

        return fused.code_scores(rows, codes, scale)
    wide = torch.promote_types(rows.dtype, torch.float32)
    rows = rows.to(wide)
    out = torch.empty(*rows.shape[:2], codes.shape[1], dtype=wide, device=rows.device)
    for a in range(0, codes.shape[1], BLOCK):
        out[:, :, a : a + BLOCK] = rows @ codes[:, a : a + BLOCK].to(wide).transpose(1, 2)
    return out.mul_(scale.unsqueeze(1))


__all__ = ["pack2", "quantized_key_scores", "unpack2"]
