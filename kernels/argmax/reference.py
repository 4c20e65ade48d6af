"""Highest score of each row in plain PyTorch: the specification of `argmax`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kernels.gumbel_noise.reference import gumbel

if TYPE_CHECKING:
    from kvcli.kernels.argmax import Noise


def argmax(logits: Tensor, noise: Noise | None = None) -> Tensor:
    """Compute logits [N, V] -> ids [N] int32, -1 = not finite."""
    scores = logits.float().double()
    if noise is not None:
        every = torch.arange(logits.shape[1], device=logits.device)
        scores = (logits.float() / noise.heat.unsqueeze(1)).double() + gumbel(noise.seed, noise.pos, every)
    best, ids = scores.max(dim=1)  # NaN counts as the highest
    return torch.where(best.isfinite(), ids, -1).int()
