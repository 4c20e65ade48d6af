"""Test which dtypes this CPU's matrix products support; kernels use other methods for unsupported ones."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """True if matrix products support this dtype. Without bf16 instructions torch multiplies bf16 number by number."""
    return dtype != torch.bfloat16 or (
        hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
