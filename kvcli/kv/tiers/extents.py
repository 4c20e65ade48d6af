"""Extents of slots, and the private temporary file that can store them.

The text could be recovered from the file. Therefore it has no name (it is unlinked once open, or removed at close where
unlinking is not possible), is readable only by its owner, and is deleted with the process. Disk blocks are allocated
before use, so that a full disk is an error on demotion and never a crash on reading. At most `writes` bytes are written
in total, because disks wear.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import WIDEST, StoredKV, attend_part, serves
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.footprint import FIRST
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import AttentionParams, LayerShape, Slots, visible
from kvcli.kv.snapshot import State
from kvcli.kv.tiers.temp_folder import temporary_folder

LARGEST = 4096  # most slots allocated ahead in an extent; extents grow with the layer


@dataclass(slots=True)
class Extent:
    """A range of slots of one layer. A slot is written once; evicting it only clears its position."""

    offset: int  # bytes, in the file
    nbytes: int
    k: Tensor  # [K, cap, D], mapped
    v: Tensor  # [K, cap, E], mapped; if values equal keys (MLA), `k` itself
    pos: Tensor  # [K, cap] int32, in memory; -1 = empty
    unreached: str = ""  # why a device cannot read the extent in place; "" = it can
    length: int = 0  # slots of the longest head
    lengths: Sequence[int] = ()  # slots of each head, if there are no holes
    has_holes: bool = False

    @property
    def room(self) -> int:
        return self.pos.shape[1] - self.length

    @property
    def slots(self) -> Slots:
        n = self.length
        return Slots(*Slots(self.k, self.v, self.pos).each(lambda t: t[:, :n]), self.pos[:, :n])

    def note(self) -> None:
        """Update lengths and `has_holes` after positions changed."""
        held = self.pos[:, : self.length] >= 0
        ends = held.sum(1)
        self.has_holes = bool((held != (torch.arange(self.length) < ends.unsqueeze(1))).any())
        self.lengths = [self.length] * len(ends) if self.has_holes else ends.tolist()

    def read(self, k: Tensor, v: Tensor, q: Tensor, params: AttentionParams, rows: Sequence[int]) -> PartialAttention:
        """Return partial attention of q [H, N, D] at positions `rows` over k, v [K, n, ..]: the slots or a copy."""
        window, softcap = params.window, params.softcap
        if q.device.type == "cpu" and serves(q, v):
            (n_kv, n), cap = k.shape[:2], self.pos.shape[1]
            starts, at = (range(0, n_kv * m, m) if m else [0] * n_kv for m in (n, cap))
            run = StoredKV(k.flatten(0, 1), v.flatten(0, 1), self.pos.flatten(), starts, self.lengths, at)
            window = WIDEST if window is None and self.has_holes else window
            return attend_part(q, run, rows, params.scale, window=window, softcap=softcap)
        if window is None and not self.has_holes:
            return attend(q, k, v, params.scale, softcap=softcap, length=self.lengths)
        mask, n = visible(self.slots.pos, rows, window), self.length
        mask = None if mask is None else mask.to(q.device)
        return attend(q, k[:, :n], v[:, :n], params.scale, softcap=softcap, mask=mask)

    def state(self) -> State:
        """Return a snapshot of views of the mapping."""
        s = self.slots
        return {"k": s.k, **({} if s.v is s.k else {"v": s.v}), "pos": s.pos}


class ExtentStorage(Protocol):
    """Storage that allocates, writes and frees extents."""

    def allocate(self, layer: int, need: int, held: Sequence[Extent]) -> Extent:
        """Allocate an extent for a layer with extents `held`, of capacity `need` or the largest allowed. Raises
        CacheFull."""

    def free(self, extents: Iterable[Extent]) -> None:
        """Free empty extents."""

    def may_write(self, layer: int, n: int) -> None:
        """Raise CacheFull if n more slots of a layer must not be written."""

    def write(self, extent: Extent, k: Tensor, v: Tensor) -> None:
        """Write k, v [K, m, ..] after the slots of the extent. Raises OSError if the device is full."""

    def tidy(self, extent: Extent) -> None:
        """Update the layout after slots were stored or evicted."""


class SlotFile:
    """Extent storage in a temporary file of at most `most` bytes."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        most: int,
        writes: int,
        folder: Path | None,
        longest: int | None = None,
    ) -> None:
        """Create the file. `folder`: None = the system's for large temporary files. `longest`: most slots of an extent;
        None = no limit."""
        self.folder = folder or temporary_folder()
        self._shapes, self._dtype = shapes, dtype
        self._most, self._writes = most, writes
        self._longest = longest
        self._per_slot = [of.numbers * dtype.itemsize for of in shapes]  # bytes, by layer
        self._shares = parts_of(most, self._per_slot)
        self._written, self._end = 0, 0  # bytes: written in total, end of the file
        self._free: list[tuple[int, int]] = []  # (offset, bytes) of freed extents
        self._file: Any = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115  # open as long as the tier

    def allocate(self, layer: int, need: int, held: Sequence[Extent]) -> Extent:
        """Allocate an extent for `need` slots of a layer with extents `held`, or the longest allowed, with its disk
        blocks.

        Spare capacity is limited to the layer's share of the file, so that all layers can store as many slots.
        """
        with self._full():
            return self._claim(layer, need if self._longest is None else min(need, self._longest), held)

    def _claim(self, layer: int, need: int, held: Sequence[Extent]) -> Extent:
        unit, per_slot = mmap.ALLOCATIONGRANULARITY, self._per_slot[layer]  # mappings start at a multiple of the unit
        again = next((i for i, (_, size) in enumerate(self._free) if size >= need * per_slot), None)
        if again is not None:
            offset, size = self._free.pop(again)
        else:
            ahead = min(LARGEST, max(FIRST, sum(e.length for e in held))) * per_slot
            share = self._shares[layer] - sum(e.nbytes for e in held)
            offset, left = self._end, (self._most - self._end) // unit * unit
            size = min(-(-max(need * per_slot, min(ahead, share)) // unit) * unit, left)
            if size < need * per_slot:
                raise CacheFull("memory.disk is full", detail={"used": self._end, "most": self._most})
            self._grow(offset + size)
        of, cap = self._shapes[layer], size // per_slot
        try:
            mapped = mmap.mmap(self._file.fileno(), size, offset=offset)
        except OSError:
            self._free.append((offset, size))
            raise
        k, v = laid(torch.frombuffer(mapped, dtype=self._dtype), of, cap)
        pos = torch.full((of.n_kv_heads, cap), -1, dtype=torch.int32)
        return Extent(offset, size, k, v, pos, "it is on the disk")

    def free(self, extents: Iterable[Extent]) -> None:
        """Free extents; their space in the file is reused."""
        self._free += [(e.offset, e.nbytes) for e in extents]

    def may_write(self, layer: int, n: int) -> None:
        """Raise CacheFull if n more slots would exceed `writes`."""
        if self._written + n * self._per_slot[layer] > self._writes:
            raise CacheFull("memory.disk_writes is used up", detail={"written": self._written, "most": self._writes})

    def write(self, extent: Extent, k: Tensor, v: Tensor) -> None:
        """Write k, v [K, m, ..] after the slots of the extent, by `pwrite`, as a mapping crashes on a full disk."""
        (heads, cap, _), number = extent.k.shape, self._dtype.itemsize
        for t, first in ((k, 0), (v, extent.k.nbytes))[: 1 if extent.v is extent.k else 2]:
            for j in range(heads):
                data = t[j].to(self._dtype).contiguous().view(torch.uint8).numpy().data.cast("B")
                at = extent.offset + first + (j * cap + extent.length) * t.shape[2] * number
                while data:
                    with self._full():
                        done = os.pwrite(self._file.fileno(), data, at)
                    self._written += done
                    at, data = at + done, data[done:]

    def tidy(self, extent: Extent) -> None:
        """Do nothing: holes stay, because slots on disk are not moved."""

    @contextmanager
    def _full(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheFull("the disk is full", lines=[f"{self.folder}: {error.strerror}"]) from error

    def _grow(self, end: int) -> None:
        fd = self._file.fileno()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, self._end, end - self._end)
        else:
            os.ftruncate(fd, end)
        self._end = end


def laid(numbers: Tensor, of: LayerShape, cap: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [K, cap, ..] of a layer as views of `numbers`, keys first."""
    sizes = [of.n_kv_heads * cap * dim for dim in (of.k_dim, of.v_dim)]
    k = numbers[: sizes[0]].view(of.n_kv_heads, cap, of.k_dim)
    return k, k if of.rank else numbers[sizes[0] : sum(sizes)].view(of.n_kv_heads, cap, of.v_dim)


def parts_of(most: int, per_slot: Sequence[int]) -> list[int]:
    """Return each layer's share in bytes of a file of `most` bytes, the same number of slots for all layers."""
    unit, whole = mmap.ALLOCATIONGRANULARITY, max(1, sum(per_slot))
    return [most * each // whole // unit * unit for each in per_slot]
