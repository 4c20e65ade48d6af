"""Access of device rows to slots in host memory: attention on the CPU, zero-copy kernels, or streamed copies.

The best method depends on transfer rates: a query is kilobytes and slots are gigabytes, but the CPU must be as fast as
the link. It is too slow for the many rows of a prefill, so slots are streamed to the device. All decoding rows use one
method, chosen by the slots stored at a compression point, never by the batch, so that rows are batch invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels.merge_attention import PartialAttention, merge_attention
from kvcli.kv.offload.transfer import DeviceEvent, DeviceLink
from kvcli.kv.slots import AttentionParams, Tier
from kvcli.kv.tiers.disk import ALIGNED, Extent, ExtentTier

Answer = Callable[[], list[PartialAttention]]


class HostAccess:
    """Access method of device rows to the slots of a host tier."""

    how = ""  # name of the method, in words

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers on the device."""
        return 0

    def ask(self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int]) -> Answer:
        """Return a function that returns, on the device, partial attention of q [H, N, D] there at positions pos [N].

        Device work that is queued before its call runs in parallel.
        """
        raise NotImplementedError

    def wait_idle(self) -> None:
        """Wait until no read of the tier is pending, before the tier changes."""


class CpuAttention(HostAccess):
    """Attention on the CPU, in parallel with other levels on the device. Only queries and results are copied.

    The CPU is done when a result is returned, so there is nothing to wait for.
    """

    how = "the CPU reads it"

    def __init__(self, tier: Tier, bus: DeviceLink) -> None:
        self._tier, self._bus = tier, bus
        self._down, self._up = Staged(bus), Staged(bus)
        self._sent: DeviceEvent | None = None  # end of the last upload of a result

    def ask(self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int]) -> Answer:
        bus, q = self._bus, q.contiguous()
        below = self._down.like(q)
        bus.copies.wait(bus.work.record())  # wait until the query is computed
        bus.copies.copy(below, q)
        here = bus.copies.record()

        def answer() -> list[PartialAttention]:
            here.synchronize()
            return [self._come_up(joined(self._tier.attend(layer, below, params, pos)), q)]

        return answer

    def _come_up(self, part: PartialAttention, q: Tensor) -> PartialAttention:
        out, lse = part.out, part.lse
        if self._sent is not None:
            self._sent.synchronize()  # the buffer is overwritten next
        both = self._up.like(out.new_empty(out.numel() + lse.numel(), dtype=lse.dtype, device="meta"))
        both[: out.numel()], both[out.numel() :] = out.flatten(), lse.flatten()
        there = torch.empty_like(both, device=q.device)
        self._bus.work.copy(there, both)
        self._sent = self._bus.work.record()
        return PartialAttention(there[: out.numel()].view(out.shape), there[out.numel() :].view(lse.shape))


class ZeroCopyKernel(HostAccess):
    """Device kernels that read pinned host memory, each byte once for all rows."""

    how = "the GPU reads it directly"

    def __init__(self, tier: ExtentTier, bus: DeviceLink) -> None:
        self._tier, self._bus = tier, bus

    def ask(self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int]) -> Answer:
        return lambda: [p.read(p.tensors, q, params, pos) for p in self._tier.pieces(layer)]

    def wait_idle(self) -> None:
        self._bus.work.record().synchronize()


@dataclass(slots=True)
class Buffer:
    """Device buffer for one chunk, with the events of its use."""

    room: Tensor  # uint8
    free: DeviceEvent | None = None  # end of its last read
    landed: DeviceEvent | None = None  # end of the copy into it


class StreamedCopy(HostAccess):
    """Streamed copies: while one chunk is read, the next one is copied, of this layer or the next one."""

    how = "the GPU copies it in streams"

    def __init__(self, tier: ExtentTier, bus: DeviceLink) -> None:
        self._tier, self._bus = tier, bus
        self._buffers: list[Buffer] = []
        self._turn = 0  # index of the buffer written next, 0 or 1
        self._ahead: tuple[int, Buffer, list[Tensor]] | None = None  # first chunk of the layer expected next
        self._after: dict[int, int] = {}  # by layer: the layer read after it last time
        self._last = -1

    def ask(self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int]) -> Answer:
        if self._last >= 0:
            self._after[self._last] = layer
        self._last = layer
        pieces = self._tier.pieces(layer)
        first = self._first(layer, pieces)
        return lambda: self._read(layer, pieces, first, q, params, pos)

    def wait_idle(self) -> None:
        self._ahead = None
        self._bus.copies.record().synchronize()

    @property
    def nbytes(self) -> int:
        return sum(buffer.room.nbytes for buffer in self._buffers)

    def _first(self, layer: int, pieces: Sequence[Extent]) -> tuple[Buffer, list[Tensor]] | None:
        """Return the first chunk, whose copy has already started if this layer was expected."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == layer:
            return ahead[1:]
        return self._fly(pieces[0]) if pieces else None

    def _read(
        self,
        layer: int,
        pieces: Sequence[Extent],
        coming: tuple[Buffer, list[Tensor]] | None,
        q: Tensor,
        params: AttentionParams,
        pos: Sequence[int],
    ) -> list[PartialAttention]:
        parts = []
        for piece, behind in zip(pieces, [*pieces[1:], None], strict=True):
            assert coming is not None
            buffer, tensors = coming
            if behind is None:
                self._expect(layer)
            else:
                coming = self._fly(behind)
            assert buffer.landed is not None
            self._bus.work.wait(buffer.landed)
            parts.append(piece.read(tensors, q, params, pos))
            buffer.free = self._bus.work.record()
        return parts

    def _expect(self, layer: int) -> None:
        """Start copying the first chunk of the layer that followed this one last time."""
        then = self._after.get(layer, -1)
        if then > layer and (pieces := self._tier.pieces(then)):  # after the last layer slots may change
            self._ahead = (then, *self._fly(pieces[0]))

    def _fly(self, piece: Extent) -> tuple[Buffer, list[Tensor]]:
        """Copy into the next buffer, once its content has been read."""
        buffer, lane = self._buffer(piece.copied), self._bus.copies
        if buffer.free is not None:
            lane.wait(buffer.free)
        tensors, at = [], 0
        for t in piece.tensors:
            at = -(-at // ALIGNED) * ALIGNED
            there = buffer.room[at : at + t.nbytes].view(t.dtype).view(t.shape)
            for to, of in [(there, t)] if t.is_contiguous() else zip(there, t, strict=True):
                lane.copy(to, of)
            tensors.append(there)
            at += t.nbytes
        buffer.landed = lane.record()
        return buffer, tensors

    def _buffer(self, nbytes: int) -> Buffer:
        if not self._buffers or self._buffers[0].room.nbytes < nbytes:
            self.wait_idle()
            self._bus.work.record().synchronize()  # torch may reuse the old buffers for queued operations
            room = 1 << max(20, (nbytes - 1).bit_length())
            self._buffers = [Buffer(torch.empty(room, dtype=torch.uint8, device=self._bus.device)) for _ in "ab"]
            self._bus.copies.wait(self._bus.work.record())  # queued operations may still use this memory
        self._turn ^= 1
        return self._buffers[self._turn]


class AutoAccess(HostAccess):
    """Choose a method: streamed copies for prefill rows, for decoding rows the faster of kernel and CPU attention."""

    def __init__(
        self, tier: ExtentTier, bus: DeviceLink, *, unserved: str = "", rates: Callable[[], Rates] | None = None
    ) -> None:
        """`unserved`: why no kernel of the device supports these values. `rates`: None = kernels are always faster."""
        self._tier, self._unserved, self._rates = tier, unserved, rates
        self._query, self._kernel = CpuAttention(tier, bus), ZeroCopyKernel(tier, bus)
        self._stream = StreamedCopy(tier, bus)
        self.how = ""  # method of the last call

    def ask(self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int]) -> Answer:
        return self._way(layer, params).ask(layer, q, params, pos)

    def wait_idle(self) -> None:
        for way in (self._query, self._kernel, self._stream):
            way.wait_idle()

    @property
    def nbytes(self) -> int:
        return self._stream.nbytes

    def _way(self, layer: int, params: AttentionParams) -> HostAccess:
        if params.is_prompt:
            return self._stream
        if params.window is not None:
            return self._query  # few slots, selected by a mask
        pieces = self._tier.pieces(layer)
        if why := self._unserved or next((p.unreached for p in pieces if p.unreached), ""):
            self.how = f"{self._query.how}: {why}"
            return self._query
        is_slow = self._rates is not None and self._rates().cpu_wins(sum(p.copied for p in pieces))
        way: HostAccess = self._query if is_slow else self._kernel
        self.how = way.how
        return way


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a machine for slots in host memory, measured by link_rates.py."""

    link: float  # bytes per second that the device reads
    cpu: float  # bytes per second that the CPU attends to
    round_trip: float  # seconds to copy a query down and its result up

    def cpu_wins(self, nbytes: int) -> bool:
        return self.round_trip + nbytes / self.cpu < nbytes / self.link


@dataclass(slots=True)
class Staged:
    """Pinned host buffer for copies of a device, one at a time."""

    bus: DeviceLink
    room: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def like(self, t: Tensor) -> Tensor:
        """Return a view of the buffer with this data type and shape."""
        n = t.numel() * t.dtype.itemsize
        if self.room.nbytes < n:
            self.room = self.bus.staging(1 << max(12, (n - 1).bit_length()))
        return self.room[:n].view(t.dtype).view(t.shape)


def joined(parts: Sequence[PartialAttention]) -> PartialAttention:
    """Merge partial attention results, in the data type of their lse."""
    lse = torch.logsumexp(torch.stack([p.lse for p in parts]), 0) if len(parts) > 1 else parts[0].lse
    return PartialAttention(merge_attention(parts).to(lse.dtype), lse)


Way = Callable[[Any, DeviceLink], HostAccess]
