"""Capture and replay of operations on a GPU: CUDA graphs. This is the only file that knows their rules.

Captured operations may not allocate, wait, or read anything on the host. They read and write the same addresses in each
replay. Python code runs during capture only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Graphs(Protocol):
    """Protocol of the device functions that captured passes need."""

    def apart(self) -> Graphs:
        """Return an object for the same device with a separate memory pool.

        A later capture may reuse intermediate memory of an earlier one in the same pool, so that replaying the earlier
        one overwrites the later one's results. Captures that are replayed in any order need separate pools.
        """

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Capture `work`. Return its result, which remains at the same address, and the function that replays it. Only
        a replay counts: `work` may run before as a warm-up, so it may not change anything of importance then.

        Raises RuntimeError if `work` synchronizes with the host.
        """

    def host(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed host memory that the device can access directly."""

    def send(self, here: Tensor, there: Tensor) -> None:
        """Copy to the device; `here` may be overwritten after the next wait for the device."""

    def fetch(self, there: Tensor, here: Tensor) -> Callable[[], None]:
        """Copy to the host and return the function that waits for the copy. By then all earlier copies have finished
        too."""


class HostSyncInCapture(Exception):
    """Raised with a reason if a model synchronizes with the host during capture."""


def captured(graphs: Graphs, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """Capture `work` with `record`; raises HostSyncInCapture if it synchronizes with the host."""
    try:
        with torch.inference_mode():
            return graphs.record(work)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise HostSyncInCapture(str(error).partition("\n")[0]) from error


class CudaGraphs:
    """CUDA graphs of one device. All captures of one object share a memory pool."""

    def __init__(self, device: torch.device, side: torch.cuda.Stream | None = None) -> None:
        """`side`: the stream to capture on. cuBLAS keeps a workspace per stream, so there is only one."""
        self._device = device
        self._side: torch.cuda.Stream = side or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def apart(self) -> CudaGraphs:
        return CudaGraphs(self._device, self._side)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Warm up on a side stream, where Triton compiles and cuBLAS allocates its workspace, then capture."""
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
        return torch.zeros(n, dtype=dtype, pin_memory=True)

    def send(self, here: Tensor, there: Tensor) -> None:
        there.copy_(here, non_blocking=True)

    def fetch(self, there: Tensor, here: Tensor) -> Callable[[], None]:
        here.copy_(there, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize
