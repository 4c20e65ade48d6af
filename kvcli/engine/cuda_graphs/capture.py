"""A device that does again what it did once, in one call: CUDA graphs. The one file that knows their rules.

What is recorded may not allocate, wait, or look at the host; it reads and writes the same addresses each time. Python
runs while it is recorded, and never again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Graphs(Protocol):
    """What frames ask of a device."""

    def apart(self) -> Graphs:
        """The same device, with memory of its own for what it records.

        What is recorded later may lie in what an earlier one computes with and lets go, so that doing the earlier one
        again destroys what the later one gave. Those that are done again in any order are recorded apart.
        """

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """What `work` gives, which lies still from now on, and how to have it filled anew. Only what is done again has
        been done: `work` may have run before, to warm up, so it may change nothing that matters by then.

        Raises RuntimeError where it asks for the host.
        """

    def host(self, n: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that the device can read and write by itself, zeros."""

    def send(self, here: Tensor, there: Tensor) -> None:
        """From the host; `here` may be written to once the device was waited for."""

    def fetch(self, there: Tensor, here: Tensor) -> Callable[[], None]:
        """To the host: how to wait for it. All that was sent before has then arrived, too."""


class HostSyncInCapture(Exception):
    """A model asks for the host where nobody may: in words, for what."""


def captured(graphs: Graphs, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """As `record`; raises HostSyncInCapture where it asks for the host."""
    try:
        with torch.inference_mode():
            return graphs.record(work)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise HostSyncInCapture(str(error).partition("\n")[0]) from error


class CudaGraphs:
    """Of one device; all that is recorded here takes its memory from one pool."""

    def __init__(self, device: torch.device, side: torch.cuda.Stream | None = None) -> None:
        """`side`: the stream to record on; cuBLAS keeps a workspace for each that it meets, so there is one."""
        self._device = device
        self._side: torch.cuda.Stream = side or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def apart(self) -> CudaGraphs:
        return CudaGraphs(self._device, self._side)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """On a side stream: Triton compiles there, and cuBLAS takes its workspace."""
        side, now = self._side, torch.cuda.current_stream(self._device)
        side.wait_stream(now)
        with torch.cuda.stream(side):
            work()
        now.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads of this process go on with what they do
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
