"""The host tier: a tier in host memory below the tiers of a device. host_access.py describes how rows read its slots.

Slots are demoted through one pinned buffer, to which a device can write without a further copy.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import NewRows, StoredKV
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.footprint import FIRST
from kvcli.kv.offload.host_access import Answer, CpuAttention, Staged, Way
from kvcli.kv.offload.transfer import CopyQueue, DeviceEvent, DeviceLink, bus_of
from kvcli.kv.slots import AttentionParams, LayerShape, Slots, Usage, attend_new_only, picked
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.sparse.page_source import Arrival, PageTier
from kvcli.kv.tiers.disk import ALIGNED, LARGEST, Extent, ExtentStorage, laid

# Dense slots in pinned host memory that a device can read in place (zero-copy).
#
# Each extent is one memory mapping, pinned when it is allocated and never moved. torch's pinned allocator would round
# each up to a power of two, and a growing buffer would be pinned again as a whole. In an extent the slots of each head
# come first and holes last, so that kernels read them by length without a mask; heads of unequal length take the space
# of the longest.

STAGED = 64 << 20  # most bytes of the buffer for copies to the host
PIECE = 16 << 20  # most bytes of an extent: the unit of copies, of which a device holds two at a time


class Mappings(ExtentStorage):
    """Extent storage in pinned host memory, which is unmapped with its last reference."""

    def __init__(self, shapes: Sequence[LayerShape], dtype: torch.dtype, bus: DeviceLink) -> None:
        super().__init__(shapes, dtype)
        self._bus, self._unreached = bus, ""

    def elsewhere(self) -> Mappings:
        return Mappings(self.shapes, self.dtype, self._bus)

    def allocate(self, layer: int, need: int, extents: Sequence[Extent]) -> Extent:
        """Allocate an extent. Sizes double with the layer, as kernels are compiled for a distance between heads."""
        shape = self.shapes[layer]
        per_slot = shape.numbers * self.dtype.itemsize
        ahead = min(LARGEST, max(need, FIRST, sum(e.length for e in extents)))
        cap = max(1, min(1 << (ahead - 1).bit_length(), PIECE // per_slot))
        mapped = mmap.mmap(-1, -(-cap * per_slot // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        # after one failure, pinning is not tried again, because it would fail again and each try costs a launch
        self._unreached = self._unreached or self._bus.pin(whole)
        if not self._unreached:
            # at exit the driver unpins the memory
            weakref.finalize(whole.untyped_storage(), self._bus.unpin, whole.data_ptr(), mapped).atexit = False
        k, v = laid(whole[: cap * per_slot].view(self.dtype), shape, cap)
        pos = torch.full((shape.n_kv_heads, cap), -1, dtype=torch.int32)
        return Extent(0, len(mapped), k, v, pos, self._unreached)

    def write(self, extent: Extent, k: Tensor, v: Tensor) -> None:
        """Copy k, v [K, m, ..] to the end of the extent."""
        at = slice(extent.length, extent.length + k.shape[1])
        extent.k[:, at] = k
        if extent.v is not extent.k:
            extent.v[:, at] = v

    def tidy(self, extent: Extent) -> None:
        """Move holes to the end of each head; the order of slots is unchanged."""
        s = extent.slots
        hole = s.pos < 0
        if not bool(hole.any()):
            return
        order = hole.to(torch.uint8).argsort(dim=1, stable=True)  # [K, S]
        moved = picked(s, order)
        s.k.copy_(moved.k)
        if s.v is not s.k:
            s.v.copy_(moved.v)
        s.pos.copy_(moved.pos)
        extent.length = int((~hole).sum(1).max())


class UploadBuffers:
    """Two alternating pinned buffers for uploads of a few slots: one is filled while the other is copied."""

    def __init__(self, bus: DeviceLink) -> None:
        self._rooms: list[tuple[Staged, DeviceEvent | None]] = [(Staged(bus), None), (Staged(bus), None)]

    def up(self, lane: CopyQueue, pairs: Sequence[tuple[Tensor, Tensor]]) -> DeviceEvent:
        """Start copies of each pair (to, from) and return the event of their end."""
        (room, busy), other = self._rooms
        if busy is not None:
            busy.synchronize()
        whole = room.like(
            torch.empty(sum(-(-of.nbytes // ALIGNED) * ALIGNED for _, of in pairs), dtype=torch.uint8, device="meta")
        )
        at = 0
        for to, of in pairs:
            piece = whole[at : at + of.nbytes].view(of.dtype).view(of.shape)
            piece.copy_(of)
            lane.copy(to, piece)
            at += -(-of.nbytes // ALIGNED) * ALIGNED
        behind = lane.record()
        self._rooms = [other, (room, behind)]
        return behind


class HostTier:
    """A tier on the CPU that rows on `device` attend to."""

    def __init__(
        self,
        tier: PageTier,
        device: torch.device | str,
        way: Way = CpuAttention,
        bus: Callable[[torch.device], DeviceLink] = bus_of,
    ) -> None:
        """`way`: access method of rows to the tier; `bus`: link to the device."""
        self._tier, self._device = tier, torch.device(device)
        self._way, self._bus = way, bus
        self._reach = way(tier, bus(self._device))
        self.staging, self._stairs = Staged(bus(self._device)), UploadBuffers(bus(self._device))

    def __deepcopy__(self, memo: dict[int, object]) -> HostTier:
        return HostTier(deepcopy(self._tier, memo), self._device, self._way, self._bus)

    @property
    def batch_variant_reason(self) -> str:
        """Return the reason of the inner tier. The access methods themselves are batch invariant."""
        return self._tier.batch_variant_reason

    def attend_async(self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int]) -> Answer:
        """Return a function that returns, on the device, partial attention of q [H, N, D] there at positions pos [N].

        Device work that is queued before its call runs in parallel.
        """
        return self._reach.ask(layer, q, params, pos) if self._tier.n_slots(layer) else list

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention over the slots and the new KV, synchronously."""
        return self.attend_async(layer, q, params, pos)() + attend_new_only(q, params, own)

    def device_layer(self, layer: int) -> str:
        return "the host chooses how rows read host memory (memory.host)"

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        self._reach.wait_idle()
        self._tier.append(layer, self._down(k), self._down(v), start)

    def take(self, layer: int, slots: Slots) -> None:
        """Store slots demoted from the device."""
        self._reach.wait_idle()
        self._tier.take(layer, Slots(*slots.each(self._down), slots.pos.cpu()))

    def n_slots(self, layer: int) -> int:
        return self._tier.n_slots(layer)

    def slots(self, layer: int) -> Slots:
        """Return a copy of the slots of a layer on the device."""
        return self._up(self._tier.slots(layer))

    def newest(self, layer: int, n: int) -> Slots:
        return self._up(self._tier.newest(layer, n))

    def positions(self, layer: int) -> Tensor:
        return self._tier.positions(layer).to(self._device)

    def run(self, layer: int) -> StoredKV | None:
        """Return None: the device does not read the slots in place."""
        return None

    def n_stable(self, layer: int, n: Tensor) -> Tensor:
        return self._tier.n_stable(layer, n.cpu()).to(n.device)

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Return slots index [K, M] on the device; only these are copied."""
        return self._up(self._tier.gather(layer, index.cpu()))

    def gather_async(self, layer: int, index: Tensor) -> Arrival:
        """Start `gather` in parallel with the computation of the device; the result waits for the copy."""
        bus = self._bus(self._device)
        s = self._tier.gather(layer, index.cpu())
        there = Slots(
            *s.each(lambda t: torch.empty_like(t, device=self._device)), torch.empty_like(s.pos, device=self._device)
        )
        pairs = [(there.k, s.k), *([] if s.v is s.k else [(there.v, s.v)]), (there.pos, s.pos)]
        bus.copies.wait(bus.work.record())  # the memory may still be in use by earlier work
        landed = self._stairs.up(bus.copies, pairs)

        def arrival() -> Slots:
            bus.work.wait(landed)
            return there

        return arrival

    def head(self, layer: int, head: int, n: int) -> Slots:
        return self._up(self._tier.head(layer, head, n))

    def evict_except(self, layer: int, mask: Tensor) -> Slots:
        """Evict slots whose mask is False and return them, in host memory."""
        self._reach.wait_idle()
        return self._tier.evict_except(layer, mask.cpu())

    def crop(self, n: int) -> None:
        self._reach.wait_idle()
        self._tier.crop(n)

    def snapshot(self) -> State:
        return self._tier.snapshot()

    def restore(self, given: SnapshotReader) -> None:
        self._reach.wait_idle()
        self._tier.restore(given)

    def usage(self) -> list[Usage]:
        """Return the bytes of the inner tier, "cpu" renamed to "host"; the first layer includes the pinned buffer."""
        found = [replace(use, tier=use.tier.replace("cpu", "host")) for use in self._tier.usage()]
        found[0] = replace(found[0], nbytes=found[0].nbytes + self.staging.room.nbytes, how=self._reach.how)
        near = self._reach.nbytes
        return [*found, Usage(0, self._device.type, 0, near)] if near else found

    def _down(self, t: Tensor) -> Tensor:
        """Copy a tensor to host memory, through a pinned buffer, in pieces."""
        if t.device.type == "cpu":
            return t
        flat, out = t.contiguous().view(torch.uint8).flatten(), torch.empty(t.nbytes, dtype=torch.uint8)
        work = self._bus(self._device).work
        for part, to in zip(torch.split(flat, STAGED), torch.split(out, STAGED), strict=True):
            piece = self.staging.like(to)
            work.copy(piece, part)
            work.record().synchronize()  # the CPU reads the buffer before its next use
            to.copy_(piece)
        return out.view(t.dtype).view(t.shape)

    def _up(self, s: Slots) -> Slots:
        return Slots(*s.each(lambda t: t.to(self._device)), s.pos.to(self._device))
