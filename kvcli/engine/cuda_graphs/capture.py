"""Capture and replay of operations on a GPU: CUDA graphs. This is the only file that knows their rules.

Captured operations may not allocate, wait, or read anything on the host. They read and write the same addresses in each
replay. Python code runs during capture only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

MOST_IN_FLIGHT = 64  # copies that the host has not waited for, at most


class HostSyncInCapture(Exception):
    """Raised with a reason if a model synchronizes with the host during capture."""


class CudaGraphs:
    """CUDA graphs of one device. All captures of one object share a memory pool."""

    def __init__(self, device: torch.device, side: torch.cuda.Stream | None = None) -> None:
        """`side`: the stream to capture on. cuBLAS keeps a workspace per stream, so there is only one."""
        self._device = device
        self._side: torch.cuda.Stream = side or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def apart(self) -> CudaGraphs:
        """Return an object for the same device with a separate memory pool.

        A later capture may reuse intermediate memory of an earlier one in the same pool, so that replaying the earlier
        one overwrites the later one's results. Captures that are replayed in any order need separate pools.
        """
        return CudaGraphs(self._device, self._side)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Capture `work`. Return its result, which remains at the same address, and the function that replays it. Only
        a replay counts: `work` runs before as a warm-up, on a side stream, where Triton compiles and cuBLAS allocates
        its workspace.

        Raises RuntimeError if `work` synchronizes with the host.
        """
        side, now = self._side, torch.cuda.current_stream(self._device)
        side.wait_stream(now)
        with torch.cuda.stream(side):
            work()
        now.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads of this process continue
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            made = work()
        self._pool = self._pool or graph.pool()
        return made, graph.replay

    def host(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed host memory that the device can access directly."""
        return torch.zeros(n, dtype=dtype, pin_memory=True)

    def send(self, here: Tensor, there: Tensor) -> None:
        """Copy to the device; `here` may be overwritten after the next wait for the device."""
        there.copy_(here, non_blocking=True)

    def fetch(self, there: Tensor, here: Tensor) -> Callable[[], None]:
        """Copy to the host and return the function that waits for the copy. By then all earlier copies have finished
        too."""
        here.copy_(there, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize


def captured(graphs: CudaGraphs, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """Capture `work` with `record`; raises HostSyncInCapture if it synchronizes with the host."""
    try:
        with torch.inference_mode():
            return graphs.record(work)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise HostSyncInCapture(str(error).partition("\n")[0]) from error


class CopiesInFlight:
    """Copies between host and device that the host has not waited for, the oldest first. A wait for one is a wait for
    all before it."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[], object], Callable[[], None] | None]] = deque()

    def add(self, then: Callable[[], object], wait: Callable[[], None] | None = None) -> Callable[[], None]:
        """Add a copy: `then` is called once the host has waited for it or for a later one. Return the function that
        sees to that, by `wait`."""
        self._queue.append(one := (then, wait))
        if len(self._queue) > MOST_IN_FLIGHT:  # of passes whose results nobody reads
            self._finish(next((old for old in self._queue if old[1] is not None), one))
        return lambda: self._finish(one)

    def finished(self) -> None:
        """Note that the host has waited for all of them."""
        while self._queue:
            self._queue.popleft()[0]()

    def _finish(self, one: tuple[Callable[[], object], Callable[[], None] | None]) -> None:
        if one in self._queue and one[1] is not None:
            one[1]()
            for _ in range(self._queue.index(one) + 1):
                self._queue.popleft()[0]()
