"""Dense slots in pinned host memory that a device can read in place (zero-copy).

Each extent is one memory mapping, pinned when it is allocated and never moved. torch's pinned allocator would round
each up to a power of two, and a growing buffer would be pinned again as a whole. In an extent the slots of each head
come first and holes last, so that kernels read them by length without a mask; heads of unequal length take the space
of the longest.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvcli.kv.footprint import FIRST
from kvcli.kv.offload.transfer import DeviceLink
from kvcli.kv.slots import LayerShape, Usage, picked
from kvcli.kv.snapshot import SnapshotReader
from kvcli.kv.tiers.extent_tier import ExtentTier
from kvcli.kv.tiers.extents import LARGEST, Extent, laid

PIECE = 16 << 20  # most bytes of an extent: the unit of copies, of which a device holds two at a time


class PinnedHostTier(ExtentTier):
    """A tier in pinned host memory for all storing layers."""

    def __init__(self, shapes: Sequence[LayerShape], dtype: torch.dtype, bus: DeviceLink) -> None:
        self._bus = bus
        super().__init__(shapes, dtype, Mappings(shapes, dtype, bus))

    def __deepcopy__(self, memo: dict[int, object]) -> PinnedHostTier:
        """Return a tier with the same slots in new mappings."""
        new = PinnedHostTier(self._shapes, self.dtype, self._bus)
        new.restore(SnapshotReader(self.snapshot(), torch.iinfo(torch.int32).max))
        return new

    def usage(self) -> list[Usage]:
        """Return the bytes of each layer, all as "cpu"."""
        return [
            Usage(layer, "cpu", self.n_slots(layer), sum(e.nbytes + e.pos.nbytes for e in extents))
            for layer, extents in enumerate(self._layers)
        ]


class Mappings:
    """Extent storage in pinned host memory."""

    def __init__(self, shapes: Sequence[LayerShape], dtype: torch.dtype, bus: DeviceLink) -> None:
        self._shapes, self._dtype, self._bus = shapes, dtype, bus
        self._unreached = ""

    def allocate(self, layer: int, need: int, held: Sequence[Extent]) -> Extent:
        """Allocate an extent. Sizes double with the layer, as kernels are compiled for a distance between heads."""
        shape = self._shapes[layer]
        per_slot = shape.numbers * self._dtype.itemsize
        ahead = min(LARGEST, max(need, FIRST, sum(e.length for e in held)))
        cap = max(1, min(1 << (ahead - 1).bit_length(), PIECE // per_slot))
        mapped = mmap.mmap(-1, -(-cap * per_slot // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        # after one failure, pinning is not tried again, because it would fail again and each try costs a launch
        self._unreached = self._unreached or self._bus.pin(whole)
        if not self._unreached:
            # at exit the driver unpins the memory
            weakref.finalize(whole.untyped_storage(), self._bus.unpin, whole.data_ptr(), mapped).atexit = False
        k, v = laid(whole[: cap * per_slot].view(self._dtype), shape, cap)
        pos = torch.full((shape.n_kv_heads, cap), -1, dtype=torch.int32)
        return Extent(0, len(mapped), k, v, pos, self._unreached)

    def free(self, extents: Iterable[Extent]) -> None:
        """Do nothing: memory is unmapped with its last reference."""

    def may_write(self, layer: int, n: int) -> None:
        """Never raise: writes are limited only by memory."""

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
