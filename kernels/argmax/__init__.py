"""Highest logit of each row, or a sample by coupled noise, without waiting for the device.

logits [N, V] in bfloat16, float16 or float32 -> ids [N] int32, -1 if the highest is not finite: the device reports the
error with its result. Of equal logits the lowest id wins. With `noise`, argmax(logits / heat + gumbel) in float64, by
the noise of kernels/gumbel_noise, which samples from softmax(logits / heat).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels import triton_support
from kvcli.kernels.argmax.reference import Noise


def why_not(logits: Tensor) -> str:
    """Return why PyTorch computes these logits; "" if the kernel does."""
    # float32 logits are compared, not multiplied
    dtype = torch.bfloat16 if logits.dtype == torch.float32 else logits.dtype
    return triton_support.why_not(logits.device, dtype)


def argmax(logits: Tensor, noise: Noise | None = None) -> Tensor:
    """Return ids [N] int32. Call it only if `why_not` returns ""."""
    from kvcli.kernels.argmax import fused  # imported late: Triton may not be installed

    return fused.argmax(logits, noise)


__all__ = ["Noise", "argmax", "why_not"]
