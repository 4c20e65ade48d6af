"""Mean rotary embedding (RoPE) of future queries: the average rotation over the next positions."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.rope import Rotary


def mean_turn(rotary: Rotary | None, pos: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the mean over positions [N] of the rotation matrices [D, D]; the identity if `rotary` is None."""
    mean = torch.eye(dim, dtype=dtype, device=pos.device)
    if rotary is None:
        return mean
    angle = pos.float().unsqueeze(1) * rotary.inv_freq.float()  # as in transformers
    cos, sin = ((f(angle) * rotary.scaling).to(dtype).mean(0) for f in (torch.cos, torch.sin))
    channel = torch.arange(2 * cos.shape[0], device=pos.device)
    a, b = (channel[0::2], channel[1::2]) if rotary.interleaved else channel.chunk(2)
    mean[a, a], mean[b, b], mean[a, b], mean[b, a] = cos, cos, -sin, sin
    return mean
