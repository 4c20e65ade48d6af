"""Transfers between host memory and a device: a compute queue, a copy queue and pinned memory.

All CUDA stream operations of the host tier use this interface. `tests/fake_bus.py` implements it without a GPU.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """An event recorded in a queue."""

    def synchronize(self) -> None:
        """Block the host until the device has reached the event."""


class CopyQueue(Protocol):
    """A queue of device operations that run in order."""

    def record(self) -> DeviceEvent:
        """Return an event after all operations queued so far."""

    def wait(self, mark: DeviceEvent) -> None:
        """Delay later operations until the event, of any queue."""

    def copy(self, to: Tensor, of: Tensor) -> None:
        """Queue a copy of contiguous tensors of one shape and type; neither may be used before a later event."""


class DeviceLink(Protocol):
    """Link from the host to a device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def work(self) -> CopyQueue:
        """Compute queue."""

    @property
    def copies(self) -> CopyQueue:
        """Queue of copies in parallel with computation."""

    def staging(self, nbytes: int) -> Tensor:
        """Return a uint8 buffer in host memory for fast copies, pinned if possible."""

    def pin(self, t: Tensor) -> str:
        """Have the device reach these bytes of a mapping of ours: "", or why it cannot. Lets go of others first."""

    def unpin(self, address: int, mapping: object) -> None:
        """Nobody refers to these bytes any more. The mapping is held until the device is asked: for what is pinned
        next, or by `release`. Called where garbage is collected, at any moment, it may not wait itself."""

    def release(self) -> None:
        """Unpin all memory that is no longer referenced."""


class NoQueue:
    """Lanes and marks of a device that does all at once, as a CPU for itself."""

    def synchronize(self) -> None: ...

    def record(self) -> DeviceEvent:
        return self

    def wait(self, mark: DeviceEvent) -> None: ...

    def copy(self, to: Tensor, of: Tensor) -> None:
        to.copy_(of)


class PlainLink:
    """Link to a device without streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.work: CopyQueue = NoQueue()
        self.copies: CopyQueue = self.work

    def __deepcopy__(self, memo: dict[int, object]) -> PlainLink:
        return self

    def staging(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def pin(self, t: Tensor) -> str:
        return f"{self.device.type} reads its own memory alone"

    def unpin(self, address: int, mapping: object) -> None: ...

    def release(self) -> None: ...


class CudaQueue:
    """A lane of a CUDA device: a stream, or whichever is current."""

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
            if self._own is not None and t.is_cuda:  # who lets go of it on the way does not have it given away
                t.record_stream(self._own)

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream(self._device)


class CudaLink(PlainLink):
    """Link to a CUDA device, with a stream for copies."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.work = CudaQueue(device)
        self.copies = CudaQueue(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        self._over: list[tuple[int, object]] = []  # addresses that nobody refers to, and their mappings

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
            # the next launch would find the error and raise it: this one does, and clears it
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
            return f"host memory cannot be pinned ({str(error).strip().splitlines()[0]})"
        return ""

    def unpin(self, address: int, mapping: object) -> None:
        self._over.append((address, mapping))

    def release(self) -> None:
        over, self._over = self._over, []
        if over:
            torch.cuda.synchronize(self.device)  # a kernel of a pass that was given up may still read there
        for address, _ in over:
            _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@cache
def bus_of(device: torch.device) -> DeviceLink:
    """Return the link to a device, with one copy stream for all sequences."""
    return CudaLink(device) if device.type == "cuda" else PlainLink(device)
