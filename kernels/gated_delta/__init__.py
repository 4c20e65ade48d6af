"""Gated delta rule over rows in order, and the convolution before it (arXiv 2412.06464).

cpu.py is native code, fused.py Triton for a GPU, reference.py plain PyTorch. A state is float32, and a row has the same
bits for any number of rows in a call. All have `gated_delta` and `causal_conv`. Captured passes need `advance_` too,
which updates a state in place by a number of rows that is known to the device alone; native code cannot be captured.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels import native, triton_support

SERVED = (torch.bfloat16, torch.float32)  # by native code


def implementation(like: Tensor, *, is_captured: bool = False) -> Any:
    """Return the module for tensors like this one; None if there is none that computes row by row as fast as needed."""
    if triton_support.serves(like):
        return import_module("kvcli.kernels.gated_delta.fused")
    if is_captured:
        return import_module("kvcli.kernels.gated_delta.reference")
    is_native = like.device.type == "cpu" and like.dtype in SERVED and native.native() is not None
    return import_module("kvcli.kernels.gated_delta.cpu") if is_native else None
