"""What the machine can do without any model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

SIZE = 256 << 20  # bytes moved: more than any cache holds
EDGE = 1024  # of the square matrices that are multiplied
CALLS = 2000  # tiny operations timed together
REPS = 5


def bandwidth(device: torch.device) -> float:
    """Bytes a second read from the device's memory."""
    x = torch.ones(SIZE // 4, device=device)
    return SIZE / _seconds(lambda: x.sum(), device)


def gemm(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP a second of a product of square matrices."""
    a = torch.ones(EDGE, EDGE, device=device, dtype=dtype)
    return 2 * EDGE**3 / _seconds(lambda: a @ a, device)


def launch(device: torch.device) -> float:
    """Seconds of an operation on one number: what a pass pays for each of its calls."""
    x = torch.ones(1, device=device)

    def many() -> None:
        for _ in range(CALLS):
            x.add_(1)

    return _seconds(many, device) / CALLS


def links(device: torch.device) -> dict[str, float]:
    """Bytes a second between host and device; nothing where they are one."""
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
    """Bytes a second of a file that is not in memory; None where the system cannot be asked to forget it."""
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
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median over a few runs, after one that counts for nothing."""
    times = []
    for _ in range(REPS + 1):
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[1:])
