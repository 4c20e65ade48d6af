"""What things take on a device: times, what passes over its memory, and when the host waited for it."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from kvcli.engine.cuda_graphs.capture import CudaGraphs

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
# of the CUDA runtime: calls at which the host waits, and copies, which wait where host memory is not pinned
CALLS = ("Synchronize", "Memcpy")


def wait(device: str) -> None:
    """Until the device has done all that it was told."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def times(do: Callable[[], object], device: str, reps: int, warm: int = 2) -> list[float]:
    """Seconds of each of `reps` calls: by events of the device, waits of the host included."""
    for _ in range(warm):
        do()
    wait(device)
    found = []
    for _ in range(reps):
        if torch.device(device).type == "cuda":
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            do()
            b.record()
            b.synchronize()
            found.append(a.elapsed_time(b) / 1e3)
        else:
            began = time.perf_counter()
            do()
            found.append(time.perf_counter() - began)
    return found


def spread(seconds: list[float]) -> list[float]:
    """Least, median, most; milliseconds."""
    return [round(1e3 * of(seconds), 4) for of in (min, statistics.median, max)]


def copy_rate(device: str, nbytes: int) -> float:
    """Bytes a second of a copy on the device, read and written."""
    a = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(1)
    b = torch.empty_like(a)
    return 2 * nbytes / statistics.median(times(lambda: b.copy_(a), device, 5))


def waited(do: Callable[[], object]) -> Counter[str]:
    """Lines at which torch says that the host waited for the device, and how often; on CUDA."""
    found: Counter[str] = Counter()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            do()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one in said:
        if "synchroniz" in str(one.message):
            path = Path(one.filename)
            found[f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{one.lineno}"] += 1
    return found


def runtime_calls(do: Callable[[], object]) -> dict[str, int]:
    """Calls of the CUDA runtime and copies by their names, as the profiler counts them; kernels as one."""
    from torch.profiler import ProfilerActivity, profile

    wait("cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        do()
        wait("cuda")  # one Synchronize of ours
    counts: Counter[str] = Counter()
    for event in found.key_averages():
        if any(call in event.key for call in CALLS):
            counts[event.key] += event.count
        elif "LaunchKernel" in event.key:
            counts["launches"] += event.count
    return dict(counts)


class Watched:
    """A device that records, and how long the host waited for it: `waited`, seconds, one for each time."""

    def __init__(self, graphs: CudaGraphs, waited: list[float] | None = None) -> None:
        self._graphs, self.waited = graphs, [] if waited is None else waited

    def apart(self) -> Watched:
        return Watched(self._graphs.apart(), self.waited)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        return self._graphs.record(work)

    def host(self, n: int, dtype: torch.dtype) -> Tensor:
        return self._graphs.host(n, dtype)

    def send(self, here: Tensor, there: Tensor) -> None:
        self._graphs.send(here, there)

    def fetch(self, there: Tensor, here: Tensor) -> Callable[[], None]:
        wait = self._graphs.fetch(there, here)

        def timed() -> None:
            began = time.perf_counter()
            wait()
            self.waited.append(time.perf_counter() - began)

        return timed


def host_seconds(do: Callable[[], object], waited: list[float], reps: int) -> list[float]:
    """Of each of `reps` calls, less what is added to `waited` meanwhile: what the host does itself."""
    found = []
    for _ in range(reps):
        before, began = sum(waited), time.perf_counter()
        do()
        found.append(time.perf_counter() - began - (sum(waited) - before))
    return found
