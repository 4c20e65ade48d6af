"""Memory of this process: its peak use, the free memory of a device, and dropping mapped pages of weights."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import psutil
import torch
from torch import Tensor

from kvcli.models.machine import kept_free


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of the process (resident set) on a CPU, or the peak of torch's allocator on a CUDA
    device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (status := Path("/proc/self/status")).exists():
        # Linux: getrusage starts at the peak of the parent process, however small this process is
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM")), "")
        if line:
            return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows has the figure in the process information
        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def used_bytes(device: torch.device) -> tuple[int, int]:
    """Return the used memory (by all programs) and the total memory of a CUDA device, from its driver; (0, 0) for other
    devices.

    The peak of torch's allocator leaves out the CUDA context, memory allocated by libraries, and fragmented blocks.
    """
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def free_device_bytes(device: torch.device) -> int:
    """Return the free memory of a device, minus a reserve."""
    if device.type == "cuda":
        free, card = map(int, torch.cuda.mem_get_info(device))
        return free - kept_free(free, card)
    free = int(psutil.virtual_memory().available)
    return free - kept_free(free)


def drop_pages(t: Tensor) -> None:
    """Drop the pages of a tensor that is no longer needed, if they are mapped from a file. Only on Linux.

    Weights are views of one mapping of their file, which exists as long as any of them. Without this, a weight that was
    rearranged would remain in memory beside its copy until the last view is freed.
    """
    page = mmap.PAGESIZE
    start = -(-t.data_ptr() // page) * page  # whole pages only: the first and the last may hold parts of other tensors
    end = (t.data_ptr() + t.nbytes) // page * page
    if sys.platform == "linux" and start < end and _is_file(start, end):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _is_file(start: int, end: int) -> bool:
    """True if one mapping of a file covers these addresses."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        low, high = (int(x, 16) for x in span.split("-"))
        if low <= start and end <= high:
            return inode != "0"
    return False
