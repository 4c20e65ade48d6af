"""Scores of keys that are stored as small whole numbers: an index reads them to decide which keys to read in full.

rows [K, R, D]; codes [K, S, D] int8; scale [K, S]: the key of a slot is about scale * code -> q . key [K, R, S], in
float32, or float64 for float64 rows. Two-bit codes stand for -3, -1, 1, 3 and are packed four to a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.code_scores import cpu, reference
from kvcli.kernels.code_scores.reference import pack2, unpack2


def code_scores(rows: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Every row with every slot of its KV head."""
    is_served = rows.device.type == "cpu" and rows.dtype != torch.float64 and cpu.serves(codes.shape[2])
    return (cpu if is_served else reference).code_scores(rows, codes, scale)


__all__ = ["code_scores", "pack2", "unpack2"]
