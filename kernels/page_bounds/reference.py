"""Bounds of pages in plain PyTorch, channel by channel: the specification of `page_bounds`."""

from __future__ import annotations

import torch
from torch import Tensor


def page_bounds(rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Bound rows [K, R, D], low, high [K, P, D] -> [K, R, P]."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    q = rows.to(wide).unsqueeze(2)  # [K, R, 1, D]
    return torch.maximum(q * low.to(wide).unsqueeze(1), q * high.to(wide).unsqueeze(1)).sum(-1)
