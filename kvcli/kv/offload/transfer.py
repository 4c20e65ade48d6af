"""Transfers between host memory and a device: a compute queue, a copy queue and pinned memory.

All CUDA stream operations of the host tier are here. `tests/fake_bus.py` checks their order without a GPU.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor


class DeviceEvent:
    """An event recorded in a queue. This one is of a device that runs every operation at once."""

    def synchronize(self) -> None:
        """Block the host until the device has reached the event."""


class CopyQueue:
    """A queue of device operations that run in order. This one is of a device that runs every operation at once."""

    def record(self) -> DeviceEvent:
        """Return an event after all operations queued so far."""
        return DeviceEvent()

    def wait(self, mark: DeviceEvent) -> None:
        """Delay later operations until the event, of any queue."""

    def copy(self, to: Tensor, of: Tensor) -> None:
        """Queue a copy of contiguous tensors of one shape and type; neither may be used before a later event."""
        to.copy_(of)


class DeviceLink:
    """Link from the host to a device. This one is to a device without streams, such as a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.work = CopyQueue()  # compute queue
        self.copies = self.work  # queue of copies in parallel with computation

    def __deepcopy__(self, memo: dict[int, object]) -> DeviceLink:
        return self

    def staging(self, nbytes: int) -> Tensor:
        """Return a uint8 buffer in host memory for fast copies, pinned if possible."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def pin(self, t: Tensor) -> str:
        """Pin these bytes of a mapping, after releasing unreferenced ones; return "" or why the device cannot."""
        return f"{self.device.type} reads its own memory alone"

    def unpin(self, address: int, mapping: object) -> None:
        """Mark these bytes as unreferenced. The mapping is kept until the next `pin` or `release` unpins it.

        This may be called by the garbage collector at any moment, so it must not block.
        """

    def release(self) -> None:
        """Unpin all memory that is no longer referenced."""


class CudaQueue(CopyQueue):
    """Queue of a CUDA device: a given stream, or the current one."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device, self._own = device, stream

    def record(self) -> DeviceEvent:
        mark: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(self._stream)
        return mark  # type: ignore[no-any-return]

    def wait(self, mark: DeviceEvent) -> None:
        self._stream.wait_event(mark)  # type: ignore[arg-type]

    def copy(self, to: Tensor, of: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(of, non_blocking=True)
        for t in (to, of):
            if self._own is not None and t.is_cuda:  # memory freed during the copy is not reused before its end
                t.record_stream(self._own)

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream(self._device)


class CudaLink(DeviceLink):
    """Link to a CUDA device, with a stream for copies."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.work = CudaQueue(device)
        self.copies = CudaQueue(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        self._over: list[tuple[int, object]] = []  # unreferenced pinned addresses and their mappings

    def staging(self, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # containers and WSL may forbid pinning; copies are then slower, with the same result
            return super().staging(nbytes)

    def pin(self, t: Tensor) -> str:
        self.release()
        try:
            torch.cuda.check_error(_runtime().cudaHostRegister(t.data_ptr(), t.nbytes, 0))
        except RuntimeError as error:
            # CUDA would raise the error again at the next launch: this launch raises and clears it
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
            return f"host memory cannot be pinned ({str(error).strip().splitlines()[0]})"
        return ""

    def unpin(self, address: int, mapping: object) -> None:
        self._over.append((address, mapping))

    def release(self) -> None:
        over, self._over = self._over, []
        if over:
            torch.cuda.synchronize(self.device)  # a kernel of a cancelled pass may still read there
        for address, _ in over:
            _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@cache
def bus_of(device: torch.device) -> DeviceLink:
    """Return the link to a device, with one copy stream for all sequences."""
    return CudaLink(device) if device.type == "cuda" else DeviceLink(device)
