"""Near ties: when rounding may have decided which token came.

A pass of one row and a pass of many sum the same products in different orders. In 16 bits that moves logits by a few
roundings, so two tokens closer than that may fall either way; both are the model's own choice at that precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDINGS = 4  # a near tie is at most so many roundings of the largest logit wide


def bound(logits: Tensor) -> Tensor:
    """logits [..., V] as the model gave them -> [...] how far apart two of them may be and still be a near tie."""
    return ROUNDINGS * torch.finfo(logits.dtype).eps * logits.double().abs().amax(-1)
