"""The likeliest token of each row, or one drawn by coupled noise, without waiting for the device.

logits [N, V] in bfloat16, float16 or float32 -> ids [N] int32, -1 where the highest is no finite number: a device says
so with its answer. Of equals the lowest id wins. With `noise`, argmax(logits / heat + gumbel) in float64, by the noise
of kernels/gumbel, which draws from softmax(logits / heat).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels import triton_support


@dataclass(frozen=True, slots=True)
class Noise:
    """By row, on the device of the logits: so a captured frame serves any sampler."""

    seed: Tensor  # [N] int64
    pos: Tensor  # [N] int64
    heat: Tensor  # [N] float32


def why_not(logits: Tensor) -> str:
    """Why logits are left to PyTorch; "" if they are not."""
    dtype = torch.bfloat16 if logits.dtype == torch.float32 else logits.dtype  # compared, and not multiplied
    return triton_support.why_not(logits.device, dtype)


def argmax(logits: Tensor, noise: Noise | None = None) -> Tensor:
    """Ids [N] int32. Only for what `why_not` has no reason against."""
    from kvcli.kernels.argmax import fused  # imported late: there is no Triton where nothing is served

    return fused.argmax(logits, noise)


__all__ = ["Noise", "argmax", "why_not"]
