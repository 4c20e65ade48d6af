"""The disk tier: keys and values in a private temporary file, read through the page cache.

What the file is, and how its room is given out: extents.py.
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
    """Keys and values in a file of at most `most` bytes, in the numbers `dtype`; read and computed on the CPU.

    The page cache keeps what was read, so nothing else has to.
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
        """`writes`: bytes written at most. `folder`: where the file is made; None = the system's for such files.
        `longest`: slots that are read in one go, of a device that has them copied past it; None = any number."""
        self._file = SlotFile(shapes, dtype, most, writes, folder, longest)
        self._how, self._longest = (shapes, dtype, most, writes), longest
        super().__init__(shapes, dtype, self._file)

    def __deepcopy__(self, memo: dict[int, object]) -> DiskTier:
        """A file of its own with the same slots in the same places, forgotten ones too."""
        new = DiskTier(*self._how, self._file.folder, self._longest)
        new.restore(SnapshotReader(self.snapshot(), torch.iinfo(torch.int32).max))
        return new

    def usage(self) -> list[Usage]:
        """Bytes of the file as "disk", and of the positions that are held in memory."""
        found = []
        for layer, extents in enumerate(self._layers):
            found.append(Usage(layer, "disk", self.n_slots(layer), sum(e.nbytes for e in extents)))
            found.append(Usage(layer, "cpu", 0, sum(e.pos.nbytes for e in extents)))
        return found
