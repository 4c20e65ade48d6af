"""What this CPU's matrix products take as it is; several kernels take another way where it is not much."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether they take these numbers. Without bf16 instructions torch multiplies bf16 number by number."""
    return dtype != torch.bfloat16 or (
        hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
