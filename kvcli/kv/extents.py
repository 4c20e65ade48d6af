"""Extents of slots in a private temporary file.

The file has no name (it is unlinked as soon as it is open, or removed at close where that cannot be), is readable by
its owner only, and dies with the process: it holds the text in recoverable form. Its blocks are claimed before they are
used, so a full disk is an error when slots come down and never a crash when they are read. At most `writes` bytes are
written in all, because disks wear.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels.attend_rows import Run
from kvcli.kv.folder import temporary_folder
from kvcli.kv.shortage import Shortage
from kvcli.kv.slots import Slots
from kvcli.kv.state import State

FIRST, LARGEST = 256, 4096  # slots of an extent: a layer's grow with what it holds


@dataclass(slots=True)
class Extent:
    """A run of slots of one layer in the file. Slots are written once; forgetting one only clears its position."""

    offset: int  # bytes
    nbytes: int
    k: Tensor  # [K, cap, D], mapped
    v: Tensor  # [K, cap, D], mapped
    pos: Tensor  # [K, cap] int32, in memory; -1 = empty
    length: int = 0  # slots of the longest head

    @property
    def room(self) -> int:
        return self.pos.shape[1] - self.length

    @property
    def has_holes(self) -> bool:
        return bool((self.slots.pos < 0).any())

    @property
    def slots(self) -> Slots:
        n = self.length
        return Slots(self.k[:, :n], self.v[:, :n], self.pos[:, :n])

    @property
    def run(self) -> Run:
        """The same, holes included."""
        n_kv, cap = self.pos.shape
        starts = range(0, n_kv * cap, cap)
        return Run(self.k.flatten(0, 1), self.v.flatten(0, 1), self.pos.flatten(), starts, [self.length] * n_kv, starts)

    def state(self) -> State:
        """As mapped."""
        s = self.slots
        return {"k": s.k, "v": s.v, "pos": s.pos}


class SlotFile:
    """Of at most `most` bytes, in runs of slots of all heads of a layer."""

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        most: int,
        writes: int,
        folder: Path | None,
    ) -> None:
        """`folder`: where the file is made; None = the system's for such files."""
        self.folder = folder or temporary_folder()
        self._heads, self._dim, self._dtype = n_kv_heads, head_dim, dtype
        self._most, self._share, self._writes = most, part_of(most, n_layers), writes
        self._per_slot = 2 * n_kv_heads * head_dim * dtype.itemsize  # bytes
        self._written, self._end = 0, 0  # bytes, of the file
        self._free: list[tuple[int, int]] = []  # (offset, bytes) of extents that are empty again
        self._file: Any = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115  # as long as the tier

    def claim(self, need: int, held: Sequence[Extent]) -> Extent:
        """An extent with room for at least `need` slots of a layer that holds these, its blocks on the disk claimed.

        It takes ahead of its need no more than its part of the file, so that the last has room for as many slots.
        """
        unit = mmap.ALLOCATIONGRANULARITY  # a map begins at a multiple of it
        again = next((i for i, (_, size) in enumerate(self._free) if size >= need * self._per_slot), None)
        if again is not None:
            offset, size = self._free.pop(again)
        else:
            ahead = min(LARGEST, max(FIRST, sum(e.length for e in held))) * self._per_slot
            share = self._share - sum(e.nbytes for e in held)
            offset, left = self._end, (self._most - self._end) // unit * unit
            size = min(-(-max(need * self._per_slot, min(ahead, share)) // unit) * unit, left)
            if size < need * self._per_slot:
                raise Shortage("memory.disk is full", detail={"used": self._end, "most": self._most})
            self._grow(offset + size)
        cap = size // self._per_slot
        try:
            mapped = mmap.mmap(self._file.fileno(), size, offset=offset)
        except OSError:
            self._free.append((offset, size))
            raise
        k, v = torch.frombuffer(mapped, dtype=self._dtype, count=2 * self._heads * cap * self._dim).view(
            2, self._heads, cap, self._dim
        )
        return Extent(offset, size, k, v, torch.full((self._heads, cap), -1, dtype=torch.int32))

    def give_back(self, extents: Iterable[Extent]) -> None:
        """Nothing is in these; their place is used again."""
        self._free += [(e.offset, e.nbytes) for e in extents]

    def may_write(self, n: int) -> None:
        """Raises Shortage where n more slots are not to be written."""
        if self._written + n * self._per_slot > self._writes:
            raise Shortage("memory.disk_writes is used up", detail={"written": self._written, "most": self._writes})

    def write(self, extent: Extent, k: Tensor, v: Tensor) -> None:
        """k, v [K, m, D] behind what the extent holds; a write says when the disk is full, a map would crash."""
        cap, row = extent.pos.shape[1], self._dim * self._dtype.itemsize
        for i, t in enumerate((k, v)):
            for j in range(self._heads):
                data = t[j].to(self._dtype).contiguous().view(torch.uint8).numpy().data.cast("B")
                at = extent.offset + ((i * self._heads + j) * cap + extent.length) * row
                while data:
                    done = os.pwrite(self._file.fileno(), data, at)
                    self._written += done
                    at, data = at + done, data[done:]

    def _grow(self, end: int) -> None:
        fd = self._file.fileno()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, self._end, end - self._end)
        else:
            os.ftruncate(fd, end)
        self._end = end


def part_of(most: int, n_layers: int) -> int:
    """Bytes that each layer can be sure of in a file of so many."""
    return most // n_layers // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
