"""Merge partial results in plain PyTorch: out = sum_i exp(lse_i - lse) out_i with lse = logsumexp_i lse_i."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """Merge [H, N, D] each and [H, N] each -> [H, N, D]."""
    lse = torch.stack(list(lses))  # [P, H, N]
    weight = torch.softmax(lse, dim=0)  # all -inf gives NaN ...
    # ... only for a row that sees no slot; and 0 * out must be 0 for any numbers in a part without visible slots
    weight = weight.nan_to_num_(0.0)
    total = outs[0] * weight[0].unsqueeze(-1)
    for out, w in zip(outs[1:], weight[1:], strict=True):
        total = total + out * w.unsqueeze(-1)
    return total
