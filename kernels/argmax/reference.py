"""Highest score of each row in plain PyTorch: the specification of `argmax`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.gumbel_noise.reference import gumbel


@dataclass(frozen=True, slots=True)
class Noise:
    """Sampling parameters by row, on the device of the logits, so that a captured pass serves any sampler."""

    seed: Tensor  # [N] int64
    pos: Tensor  # [N] int64
    heat: Tensor  # [N] float32


def argmax(logits: Tensor, noise: Noise | None = None) -> Tensor:
    """Compute logits [N, V] -> ids [N] int32, -1 = not finite."""
    scores = logits.float().double()
    if noise is not None:
        every = torch.arange(logits.shape[1], device=logits.device)
        scores = (logits.float() / noise.heat.unsqueeze(1)).double() + gumbel(noise.seed, noise.pos, every)
    best, ids = scores.max(dim=1)  # NaN counts as the highest
    return torch.where(best.isfinite(), ids, -1).int()
