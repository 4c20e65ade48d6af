"""How much memory this process has used at most, by the measure of the device it computes on."""

from __future__ import annotations

import psutil
import torch


def peak_bytes(device: torch.device) -> int:
    """The process's peak on a CPU (resident set), torch's peak allocation on a CUDA device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows keeps the figure in the process information
        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
    import sys

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
