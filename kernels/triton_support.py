"""Devices that the Triton kernels support, and the reason why the others run the references.

The kernels need an NVIDIA GPU with bfloat16 matrix units (compute capability 8.0). Their source also compiles for AMD
GPUs, where it was never run. Triton's interpreter runs tensors on a CPU, for tests only.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

LEAST = (8, 0)  # compute capability
TYPES = (torch.bfloat16, torch.float16)  # float32 and float64 need full precision, which matrix units do not have


@cache  # called in each layer of a pass
def why_not(device: torch.device, dtype: torch.dtype) -> str:
    """Return why tensors of this device and dtype are not supported; "" if they are."""
    if device.type != "cuda":
        return f"no fused kernels for {device.type}"
    if dtype not in TYPES:
        return f"{str(dtype).removeprefix('torch.')} needs full precision"
    return _why_no_card(device)


@cache
def _why_no_card(device: torch.device) -> str:
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip is not None:
        return "an AMD card: the kernels compile for it, and have never run on one"
    if not torch.cuda.is_available():
        return "no CUDA device here"
    have = torch.cuda.get_device_capability(device)
    if have < LEAST:
        return f"fused kernels need compute capability {LEAST[0]}.{LEAST[1]}, this card has {have[0]}.{have[1]}"
    return ""


def tiles_under_way(device: torch.device) -> int:
    """Return the pipeline stages of attention kernels, so that loads overlap: three if a multiprocessor has over 100 KB
    of shared memory and two programs still fit. The result's bits do not depend on the number."""
    return 3 if device.type == "cuda" and torch.cuda.get_device_capability(device) in ((8, 0), (9, 0)) else 2


def serves(*tensors: Tensor) -> bool:
    """True if kernels without matrix products support all these tensors: such kernels compute in float32."""
    return all(t.dtype in (*TYPES, torch.float32) and not why_not(t.device, TYPES[0]) for t in tensors)
