"""The disk tier: keys and values in a private temporary file, read through the page cache of the system.

The file and the allocation of its space are described in extents.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kvcli.kv.slots import LayerShape, Usage
from kvcli.kv.snapshot import SnapshotReader
from kvcli.kv.tiers.extent_tier import ExtentTier
from kvcli.kv.tiers.extents import SlotFile


class DiskTier(ExtentTier):
    """A tier of keys and values of type `dtype` in a file of at most `most` bytes; attention runs on the CPU.

    The page cache of the system keeps read pages, so the tier has no cache.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        most: int,
        writes: int,
        folder: Path | None = None,
        longest: int | None = None,
    ) -> None:
        """`writes`: most bytes written. `folder`: folder of the file; None = the system's for large temporary files.
        `longest`: most slots of an extent, for a device to which extents are copied; None = any number."""
        self._file = SlotFile(shapes, dtype, most, writes, folder, longest)
        self._how, self._longest = (shapes, dtype, most, writes), longest
        super().__init__(shapes, dtype, self._file)

    def __deepcopy__(self, memo: dict[int, object]) -> DiskTier:
        """Return a tier with a new file and the same slots in the same extents, evicted slots included."""
        new = DiskTier(*self._how, self._file.folder, self._longest)
        new.restore(SnapshotReader(self.snapshot(), torch.iinfo(torch.int32).max))
        return new

    def usage(self) -> list[Usage]:
        """Return the bytes of the file as "disk", and of the positions in memory as "cpu"."""
        found = []
        for layer, extents in enumerate(self._layers):
            found.append(Usage(layer, "disk", self.n_slots(layer), sum(e.nbytes for e in extents)))
            found.append(Usage(layer, "cpu", 0, sum(e.pos.nbytes for e in extents)))
        return found
