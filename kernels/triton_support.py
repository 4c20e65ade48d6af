"""Which devices the Triton kernels serve, and for what reason they leave others to the references.

They need a card whose matrix units take bfloat16 (compute capability 8.0), and are written for NVIDIA's. Their source
compiles for AMD's cards too, where nobody has run it. Triton's interpreter serves tensors on a CPU, for tests alone.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

LEAST = (8, 0)  # compute capability
TYPES = (torch.bfloat16, torch.float16)  # float32 and float64 are held to in full, which matrix units are not


@cache  # asked in each layer of a pass
def why_not(device: torch.device, dtype: torch.dtype) -> str:
    """Why tensors of this type there are not served; "" if they are."""
    if device.type != "cuda":
        return f"no fused kernels for {device.type}"
    if dtype not in TYPES:
        return f"{str(dtype).removeprefix('torch.')} is held to in full"
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
    """Of what a kernel of attention reads, so that loads hide behind each other: three where a processor shares more
    than 100 KB and has room for two programs of it all the same. No bit depends on it."""
    return 3 if device.type == "cuda" and torch.cuda.get_device_capability(device) in ((8, 0), (9, 0)) else 2


def serves(*tensors: Tensor) -> bool:
    """Whether kernels without matrix products take all these: they compute in float32."""
    return all(t.dtype in (*TYPES, torch.float32) and not why_not(t.device, TYPES[0]) for t in tensors)
