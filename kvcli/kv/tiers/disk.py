"""The disk tier: keys and values in a private temporary file, read through the page cache of the system.

First the file and the allocation of its space, then the tier of extents that lies in it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import WIDEST, NewRows, StoredKV, attend_part, serves, why_not
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.footprint import FIRST
from kvcli.kv.out_of_memory import CacheFull
from kvcli.kv.slots import (
    AttentionParams,
    LayerShape,
    Slots,
    Usage,
    attend_new_only,
    compact,
    concat_slots,
    empty,
    storing_layer_of,
    visible,
)
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.tiers.lower_tier import StoredBelow

# Folder of the private KV file: on a disk, not on a file system in memory.

IN_MEMORY = ("tmpfs", "ramfs")  # file systems that are no disk


def temporary_folder() -> Path:
    """Return the system's folder for large temporary files that is on a disk. Raises CacheFull if there is none."""
    found = [Path("/var/tmp"), Path(tempfile.gettempdir())]
    for folder in found:
        if folder.is_dir() and _file_system(folder) not in IN_MEMORY:
            return folder
    names = ", ".join(map(str, found))
    raise CacheFull("memory.disk needs a folder on a disk", lines=[f"{names}: in memory, or missing"])


def _file_system(folder: Path) -> str:
    """Return the type of the file system of a folder."""
    at = folder.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if at.is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else ""


# Extents of slots, and the private temporary file that can store them.
#
# The text could be recovered from the file. Therefore it has no name (it is unlinked once open, or removed at close
# where unlinking is not possible), is readable only by its owner, and is deleted with the process. Disk blocks are
# allocated before use, so that a full disk is an error on demotion and never a crash on reading. At most `writes` bytes
# are written in total, because disks wear.

ALIGNED = 16  # bytes, the load size of kernels
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
    tensors: tuple[Tensor, ...] = ()  # keys and values of the slots, as views; one tensor if they are equal

    @property
    def room(self) -> int:
        return self.pos.shape[1] - self.length

    @property
    def slots(self) -> Slots:
        n = self.length
        return Slots(*Slots(self.k, self.v, self.pos).each(lambda t: t[:, :n]), self.pos[:, :n])

    @property
    def copied(self) -> int:
        """Bytes of a copy of the slots, with alignment."""
        return sum(-(-t.nbytes // ALIGNED) * ALIGNED for t in self.tensors)

    def note(self) -> None:
        """Update lengths, `has_holes` and `tensors` after slots changed."""
        s = self.slots
        self.tensors = (s.k,) if s.v is s.k else (s.k, s.v)
        is_stored = self.pos[:, : self.length] >= 0
        ends = is_stored.sum(1)
        self.has_holes = bool((is_stored != (torch.arange(self.length) < ends.unsqueeze(1))).any())
        self.lengths = [self.length] * len(ends) if self.has_holes else ends.tolist()

    def read(self, of: Sequence[Tensor], q: Tensor, params: AttentionParams, rows: Sequence[int]) -> PartialAttention:
        """Return partial attention of q [H, N, D] at positions `rows` over `of`: `tensors`, a copy, or `k` and `v`."""
        k, v, window, softcap = of[0], of[-1], params.window, params.softcap
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


class ExtentStorage:
    """Storage that allocates, writes and frees extents. By default without a limit, and holes stay where they are."""

    name = "cpu"  # of the tier in reports

    def __init__(self, shapes: Sequence[LayerShape], dtype: torch.dtype) -> None:
        """`shapes`: by layer; a layer that reads the slots of another layer stores none."""
        self.shapes, self.dtype = shapes, dtype

    def elsewhere(self) -> ExtentStorage:
        """Return an empty storage of the same kind."""
        raise NotImplementedError

    def allocate(self, layer: int, need: int, extents: Sequence[Extent]) -> Extent:
        """Allocate an extent for a layer that has `extents`, of capacity `need` or the largest allowed. Raises
        CacheFull."""
        raise NotImplementedError

    def free(self, extents: Iterable[Extent]) -> None:
        """Free empty extents."""

    def may_write(self, layer: int, n: int) -> None:
        """Raise CacheFull if n more slots of a layer must not be written."""

    def write(self, extent: Extent, k: Tensor, v: Tensor) -> None:
        """Write k, v [K, m, ..] after the slots of the extent. Raises OSError if the device is full."""
        raise NotImplementedError

    def tidy(self, extent: Extent) -> None:
        """Update the layout after slots were stored or evicted."""


class SlotFile(ExtentStorage):
    """Extent storage in a temporary file. The page cache of the system keeps read pages, so there is no other cache."""

    name = "disk"

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        most: int,
        writes: int,
        folder: Path | None = None,
        longest: int | None = None,
    ) -> None:
        """Create the file, of at most `most` bytes, in which at most `writes` bytes are written. `folder`: None = the
        system's for large temporary files. `longest`: most slots of an extent, for a device to which extents are
        copied; None = any number."""
        super().__init__(shapes, dtype)
        self._how = shapes, dtype, most, writes, folder, longest
        self.folder = folder or temporary_folder()
        self._most, self._writes = most, writes
        self._longest = longest
        self._per_slot = [of.numbers * dtype.itemsize for of in shapes]  # bytes, by layer
        self._shares = parts_of(most, self._per_slot)
        self._written, self._end = 0, 0  # bytes: written in total, end of the file
        self._free: list[tuple[int, int]] = []  # (offset, bytes) of freed extents
        self._file: Any = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115  # open as long as the tier

    def elsewhere(self) -> SlotFile:
        return SlotFile(*self._how)

    def allocate(self, layer: int, need: int, extents: Sequence[Extent]) -> Extent:
        """Allocate an extent for `need` slots of a layer, or the longest allowed, with its disk blocks.

        Spare capacity is limited to the layer's share of the file, so that all layers can store as many slots.
        """
        with self._full():
            return self._claim(layer, need if self._longest is None else min(need, self._longest), extents)

    def _claim(self, layer: int, need: int, extents: Sequence[Extent]) -> Extent:
        unit, per_slot = mmap.ALLOCATIONGRANULARITY, self._per_slot[layer]  # mappings start at a multiple of the unit
        again = next((i for i, (_, size) in enumerate(self._free) if size >= need * per_slot), None)
        if again is not None:
            offset, size = self._free.pop(again)
        else:
            ahead = min(LARGEST, max(FIRST, sum(e.length for e in extents))) * per_slot
            share = self._shares[layer] - sum(e.nbytes for e in extents)
            offset, left = self._end, (self._most - self._end) // unit * unit
            size = min(-(-max(need * per_slot, min(ahead, share)) // unit) * unit, left)
            if size < need * per_slot:
                raise CacheFull("memory.disk is full", detail={"used": self._end, "most": self._most})
            self._grow(offset + size)
        of, cap = self.shapes[layer], size // per_slot
        try:
            mapped = mmap.mmap(self._file.fileno(), size, offset=offset)
        except OSError:
            self._free.append((offset, size))
            raise
        k, v = laid(torch.frombuffer(mapped, dtype=self.dtype), of, cap)
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
        (heads, cap, _), number = extent.k.shape, self.dtype.itemsize
        for t, first in ((k, 0), (v, extent.k.nbytes))[: 1 if extent.v is extent.k else 2]:
            for j in range(heads):
                data = t[j].to(self.dtype).contiguous().view(torch.uint8).numpy().data.cast("B")
                at = extent.offset + first + (j * cap + extent.length) * t.shape[2] * number
                while data:
                    with self._full():
                        done = os.pwrite(self._file.fileno(), data, at)
                    self._written += done
                    at, data = at + done, data[done:]

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


# A tier of extents that never move, in a file (disk.py) or in host memory (host.py).
#
# Attention runs on each extent and the partial results are merged. A layer grows by further extents, without copies.


class ExtentTier(StoredBelow):
    """A tier of keys and values in full precision, in extents of one place; attention runs on the CPU."""

    UNCAPTURED = "slots are in host memory or in a file (memory.host, memory.disk)"

    def __init__(self, place: ExtentStorage) -> None:
        self.dtype, self._shapes, self._place = place.dtype, place.shapes, place
        self._holder = storing_layer_of(place.shapes)
        self._layers: list[list[Extent]] = [[] for _ in place.shapes]

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return a tier with the same slots in the same extents, evicted slots included, elsewhere."""
        new = copy(self)
        new._place, new._layers = self._place.elsewhere(), [[] for _ in self._shapes]
        new.restore(SnapshotReader(self.snapshot(), torch.iinfo(torch.int32).max))
        return new

    @property
    def _storing(self) -> Iterable[int]:
        return (layer for layer, extents in enumerate(self._layers) if extents)

    @property
    def batch_variant_reason(self) -> str:
        """Return "kv.dtype" if no batch-invariant kernel supports data type and head size."""
        cpu = torch.device("cpu")
        sizes = {(shape.k_dim, shape.v_dim) for shape in self._shapes}
        return "kv.dtype" if any(why_not(self.dtype, cpu, *size) for size in sizes) else ""

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N] over each extent."""
        parts = [e.read((e.k, e.v), q, params, pos) for e in self.pieces(self._holder[layer])]
        return [*parts, *attend_new_only(q, params, own)]

    def usage(self) -> list[Usage]:
        """Return the bytes of each layer: of the slots where they are, and of their positions as "cpu"."""
        found = []
        for layer, extents in enumerate(self._layers):
            found.append(Usage(layer, self._place.name, self.n_slots(layer), sum(e.nbytes for e in extents)))
            found.append(Usage(layer, "cpu", 0, sum(e.pos.nbytes for e in extents)))
        return found

    def pieces(self, layer: int) -> list[Extent]:
        """Return the extents of a layer that rows read, one after another."""
        return [e for e in self._layers[layer] if e.length]

    def take(self, layer: int, slots: Slots) -> None:
        """Store slots. Stores all of them, or none and raises CacheFull."""
        self._store(layer, compact(slots, slots.pos >= 0) if bool((slots.pos < 0).any()) else slots)

    def _store(self, layer: int, s: Slots) -> None:
        """Store slots without compacting them."""
        n, extents = s.n_slots, self._layers[layer]
        assert self._holder[layer] == layer, "this layer stores no slots: it shares those of another layer"
        self._place.may_write(layer, n)
        at = min(n, extents[-1].room) if extents else 0
        places, fresh = [(extents[-1], 0, at)] if at else [], list[Extent]()
        try:
            while at < n:
                fresh.append(self._place.allocate(layer, n - at, [*extents, *fresh]))
                places.append((fresh[-1], at, min(n, at + fresh[-1].room)))
                at = places[-1][2]
            for extent, a, b in places:
                self._place.write(extent, s.k[:, a:b], s.v[:, a:b])
        except BaseException:
            self._place.free(fresh)
            raise
        for extent, a, b in places:
            extent.pos[:, extent.length : extent.length + b - a] = s.pos[:, a:b]
            extent.length += b - a
            self._tidy(extent)
        extents += fresh

    def n_slots(self, layer: int) -> int:
        """Return the slots of the longest head, including evicted slots in extents that are not empty."""
        return sum(extent.length for extent in self._layers[self._holder[layer]])

    def slots(self, layer: int) -> Slots:
        """Return the slots of a layer: a copy in memory, or views of the mapping if there is one extent."""
        found = [extent.slots for extent in self._layers[self._holder[layer]]]
        if len(found) == 1:
            return found[0]
        return concat_slots([self._none(layer), *found])

    def positions(self, layer: int) -> Tensor:
        """Return pos [K, S] of all slots, -1 = evicted."""
        return torch.cat(
            [self._none(layer).pos, *(extent.slots.pos for extent in self._layers[self._holder[layer]])], 1
        )

    def n_stable(self, layer: int, n: Tensor) -> Tensor:
        """Return n [K]: no slot will be quantized."""
        return n

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Return a copy of slots index [K, M] of each head, -1 = empty; reads only the file pages of these slots."""
        k, v = self._none(layer).each(lambda t: t.new_zeros(*index.shape, t.shape[2]))
        pos, first = torch.full_like(index, -1, dtype=torch.int32), 0
        for s in (extent.slots for extent in self._layers[self._holder[layer]]):
            heads, to = ((index >= first) & (index < first + s.n_slots)).nonzero(as_tuple=True)
            at = index[heads, to] - first
            k[heads, to], pos[heads, to] = s.k[heads, at], s.pos[heads, at]
            if v is not k:
                v[heads, to] = s.v[heads, at]
            first += s.n_slots
        return Slots(k, v, pos)

    def head(self, layer: int, head: int, n: int) -> Slots:
        """Return a copy of the first n slots of one head."""
        at, found = slice(head, head + 1), [extent.slots for extent in self._layers[self._holder[layer]]]
        s = concat_slots([Slots(*s.each(lambda t: t[at]), s.pos[at]) for s in found])
        return Slots(*s.each(lambda t: t[:, :n]), s.pos[:, :n])

    def _keep(self, layer: int, mask: Tensor) -> None:
        """Evict slots. The space of an empty extent, and that at the end of a layer's last extent, is reused."""
        extents = self._layers[layer]
        for extent, part in zip(extents, mask.split_with_sizes([e.length for e in extents], dim=1), strict=True):
            extent.pos[:, : extent.length].masked_fill_(~part, -1)
        live = (extents[-1].pos >= 0).any(0).nonzero()
        extents[-1].length = int(live.max()) + 1 if live.numel() else 0
        for extent in extents:
            self._tidy(extent)
        empty = [e for e in extents if not bool((e.pos >= 0).any())]
        self._layers[layer] = [e for e in extents if not any(e is gone for gone in empty)]
        self._place.free(empty)

    def snapshot(self) -> State:
        """Return a snapshot by layer and extent: views of the mappings."""
        return {str(layer): {str(i): e.state() for i, e in enumerate(each)} for layer, each in enumerate(self._layers)}

    def restore(self, given: SnapshotReader) -> None:
        """Restore the same extents, because attention runs on each of them separately."""
        for layer in range(len(self._layers)):
            for one in given.part(str(layer)).parts(given.n):
                none = self._none(layer)
                pos = one.positions("pos", none.pos.shape[0], None, least=-1)
                k = one.tensor("k", self.dtype, *pos.shape, none.k.shape[2])
                v = k if none.v is none.k else one.tensor("v", self.dtype, *pos.shape, none.v.shape[2])
                self._layers[layer].append(self._place.allocate(layer, max(1, pos.shape[1]), self._layers[layer]))
                self._store(layer, Slots(k, v, pos))

    def _tidy(self, extent: Extent) -> None:
        self._place.tidy(extent)
        extent.note()

    def _none(self, layer: int) -> Slots:
        shape = self._shapes[layer]
        return Slots(*empty(shape, self.dtype), torch.empty(shape.n_kv_heads, 0, dtype=torch.int32))
