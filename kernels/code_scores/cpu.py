"""Scores of coded keys on the CPU: torch's int8 product, which reads the codes as they are.

Widening them first would write four times the bytes that are read.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvcli.kernels.code_scores import reference

WITHIN = 1e-5  # of the largest score: sums in float32 and nothing less


def code_scores(rows: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """rows [K, R, D], codes [K, S, D], scale [K, S] -> [K, R, S]."""
    rows, scale = rows.float().contiguous(), scale.float().contiguous()
    out = rows.new_empty(*rows.shape[:2], codes.shape[1])
    for j in range(rows.shape[0]):  # the product takes one matrix
        out[j] = torch.ops.aten._weight_int8pack_mm(rows[j], codes[j].contiguous(), scale[j])
    return out


@cache
def serves(d: int) -> bool:
    """Does this torch have the product, for float32 rows of d channels, and does it sum in float32?"""
    if d % 16:
        return False  # it reads 16 channels at a time, beyond the end too
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 5, d, generator=random)
    codes = torch.randint(-127, 128, (1, 37, d), generator=random, dtype=torch.int8)
    scale = torch.rand(1, 37, generator=random)
    try:
        got = code_scores(rows, codes, scale)
    except (RuntimeError, AttributeError):  # a private op: another torch may lack it, or refuse the type
        return False
    want = reference.code_scores(rows, codes, scale)
    return bool((got - want).abs().max() <= WITHIN * want.abs().max())
