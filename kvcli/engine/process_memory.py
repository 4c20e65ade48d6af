"""Memory of this process: how much it used at most, and giving back what a weight no longer needs."""

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
    """The process's peak on a CPU (resident set), torch's peak allocation on a CUDA device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (status := Path("/proc/self/status")).exists():
        # Linux; its getrusage begins with the peak of the process that started this one, however small this one is
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM")), "")
        if line:
            return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows keeps the figure in the process information
        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def used_bytes(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device, what all programs took of it and how much it has, as its driver says; none of other devices.

    The peak of torch's allocator knows nothing of the context, of libraries that take memory by themselves, nor of
    blocks that fit nothing any more.
    """
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def free_device_bytes(device: torch.device) -> int:
    """What is free there now, without what nothing plans with."""
    if device.type == "cuda":
        free, card = map(int, torch.cuda.mem_get_info(device))
        return free - kept_free(free, card)
    free = int(psutil.virtual_memory().available)
    return free - kept_free(free)


def drop_pages(t: Tensor) -> None:
    """Drop the pages of a tensor that nobody will read again, if they are mapped from a file. Only Linux can.

    Weights are views of one mapping of their file, which lives as long as any of them. Without this, a weight that was
    rearranged would stay in memory beside its new form until the last one is.
    """
    page = mmap.PAGESIZE
    start = -(-t.data_ptr() // page) * page  # whole pages only: the ones at the ends belong to neighbours too
    end = (t.data_ptr() + t.nbytes) // page * page
    if sys.platform == "linux" and start < end and _is_file(start, end):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _is_file(start: int, end: int) -> bool:
    """Whether one mapping of a file covers these addresses."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        low, high = (int(x, 16) for x in span.split("-"))
        if low <= start and end <= high:
            return inode != "0"
    return False
