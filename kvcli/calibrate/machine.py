"""Measure the machine without a model: bandwidths, matrix products, launch cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

SIZE = 256 << 20  # bytes moved: more than any CPU or GPU cache holds
EDGE = 1024  # size of the square matrices that are multiplied
CALLS = 2000  # tiny operations timed together
REPS = 5


def bandwidth(device: torch.device) -> float:
    """Measure the bytes per second read from the device's memory."""
    x = torch.ones(SIZE // 4, device=device)
    return SIZE / _seconds(lambda: x.sum(), device)


def gemm(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP per second of a product of square matrices."""
    a = torch.ones(EDGE, EDGE, device=device, dtype=dtype)
    return 2 * EDGE**3 / _seconds(lambda: a @ a, device)


def launch(device: torch.device) -> float:
    """Measure the seconds of an operation on one number: the cost of each call in a pass."""
    x = torch.ones(1, device=device)

    def many() -> None:
        for _ in range(CALLS):
            x.add_(1)

    return _seconds(many, device) / CALLS


def links(device: torch.device) -> dict[str, float]:
    """Measure the bytes per second between host and device; empty if both are the same memory."""
    if device.type != "cuda":
        return {}
    there = torch.empty(SIZE, dtype=torch.uint8, device=device)
    found = {}
    for name, pinned in (("pinned", True), ("pageable", False)):
        here = torch.empty(SIZE, dtype=torch.uint8, pin_memory=pinned)
        found[f"to_device_{name}"] = SIZE / _seconds(lambda h=here: there.copy_(h), device)  # type: ignore[misc]
        found[f"to_host_{name}"] = SIZE / _seconds(lambda h=here: h.copy_(there), device)  # type: ignore[misc]
    return found


def disk(file: Path) -> float | None:
    """Measure the bytes per second of a file read from disk; None if the system cannot drop the file from memory."""
    if not hasattr(os, "posix_fadvise") or not file.is_file():
        return None
    handle = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        began, count = time.perf_counter(), 0
        while count < SIZE and (block := os.read(handle, 4 << 20)):
            count += len(block)
        took = time.perf_counter() - began
    finally:
        os.close(handle)
    return count / took if took > 0 and count else None


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median of several runs, after one warm-up run."""
    times = []
    for _ in range(REPS + 1):
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[1:])
