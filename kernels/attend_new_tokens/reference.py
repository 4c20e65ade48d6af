"""Attention of rows over rows in plain PyTorch: `attend` with an explicit causal or ancestor mask."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.attend.reference import attend


def attend_new_tokens(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sees: Tensor | None, softcap: float
) -> tuple[Tensor, Tensor]:
    n = q.shape[1]
    if sees is None:
        sees = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    return attend(q, k, v, scale, softcap, sees, k.shape[1])
