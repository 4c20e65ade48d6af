"""The disk tier: keys and values in a private temporary file, read through the page cache.

The file has no name (it is unlinked as soon as it is open, or removed at close where that cannot be), is readable by
its owner only, and dies with the process: it holds the text in recoverable form. Its blocks are claimed before they are
used, so a full disk is an error when slots come down and never a crash when they are read. Written at most once per
slot and at most `writes` bytes in all, because disks wear.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_rows import WIDEST, Own, Run, attend_part, serves, why_not
from kvcli.kernels.merge import Part
from kvcli.kv.folder import temporary_folder
from kvcli.kv.shortage import Shortage
from kvcli.kv.slots import Sight, Slots, Usage, alone, compact, last, run_of, visible
from kvcli.kv.state import Given, State


@dataclass(slots=True)
class _Extent:
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


class Disk:
    """Keys and values in a file of at most `most` bytes, in the numbers `dtype`; read and computed on the CPU."""

    is_far = False  # the page cache keeps it
    FIRST, LARGEST = 256, 4096  # slots of an extent: a layer's grow with what it holds

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        most: int,
        writes: int,
        folder: Path | None = None,
    ) -> None:
        """`writes`: bytes written at most. `folder`: where the file is made; None = the system's for such files."""
        self.dtype = dtype
        self.written = 0  # bytes
        self._heads, self._dim = n_kv_heads, head_dim
        self._most, self._writes = most, writes
        self._folder = folder or temporary_folder()
        self._file: Any = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  # as long as the tier
        self._end = 0  # bytes of the file
        self._free: list[tuple[int, int]] = []  # (offset, bytes) of extents that are empty again
        self._layers: list[list[_Extent]] = [[] for _ in range(n_layers)]

    def __deepcopy__(self, memo: dict[int, object]) -> Disk:
        """A file of its own with the same slots in the same places, forgotten ones too."""
        n_layers = len(self._layers)
        new = Disk(n_layers, self._heads, self._dim, self.dtype, self._most, self._writes, self._folder)
        new.restore(Given(self.state(), torch.iinfo(torch.int32).max))
        return new

    @property
    def rounds_by_rows(self) -> str:
        """Where native kernels do not serve its numbers."""
        return "kv.dtype" if why_not(self.dtype, torch.device("cpu"), self._dim, self._dim) else ""

    def attend(self, layer: int, q: Tensor, sight: Sight, pos: Sequence[int], own: Own | None = None) -> list[Part]:
        """q [H, N, D] of rows at positions pos [N] -> one part for each extent."""
        parts = []
        for extent in self._layers[layer]:
            s = extent.slots
            if not extent.length:
                continue
            if serves(q, s.v):
                window = WIDEST if sight.window is None and extent.has_holes else sight.window
                found = attend_part(q, extent.run, pos, sight.scale, window=window, softcap=sight.softcap)
            else:
                mask = visible(s.pos, pos, sight.window)
                found = attend(q, s.k, s.v, sight.scale, softcap=sight.softcap, mask=mask)
            parts.append(found)
        return [*parts, *alone(q, sight, own)]

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] at positions from `start` on; every head takes all of them."""
        self.take(layer, Slots(k, v, run_of(start, k.shape[1], k.shape[0], k.device)))

    def take(self, layer: int, slots: Slots) -> None:
        """Write these slots to the file. All of them are stored, or none and Shortage is raised."""
        self._store(layer, compact(slots, slots.pos >= 0) if bool((slots.pos < 0).any()) else slots)

    def _store(self, layer: int, s: Slots) -> None:
        """As they are."""
        n, held = s.n_slots, self._layers[layer]
        if self.written + n * self._per_slot > self._writes:
            raise Shortage("memory.disk_writes is used up", detail={"written": self.written, "most": self._writes})
        fresh: list[_Extent] = []
        try:
            rest = n - (held[-1].room if held else 0)  # slots
            if rest > 0:
                fresh.append(self._claim(rest, layer))
            places = _places([*held[-1:], *fresh], n)
            for extent, a, b in places:
                self._write(extent, s.k[:, a:b], s.v[:, a:b])
        except BaseException as error:
            self._free += [(extent.offset, extent.nbytes) for extent in fresh]
            if isinstance(error, OSError):
                raise Shortage("the disk is full", lines=[f"{self._folder}: {error.strerror}"]) from error
            raise
        for extent, a, b in places:
            extent.pos[:, extent.length : extent.length + b - a] = s.pos[:, a:b]
            extent.length += b - a
        held += fresh

    def n_slots(self, layer: int) -> int:
        """Slots of the longest head, forgotten ones included where others share their extent."""
        return sum(extent.length for extent in self._layers[layer])

    def slots(self, layer: int) -> Slots:
        """A copy in memory of what this layer holds; as mapped where one extent holds it all."""
        found = [extent.slots for extent in self._layers[layer]]
        if len(found) == 1:
            return found[0]
        none = torch.empty(self._heads, 0, self._dim, dtype=self.dtype)
        return Slots(
            torch.cat([none, *(s.k for s in found)], 1),
            torch.cat([none, *(s.v for s in found)], 1),
            torch.cat([none[..., 0].to(torch.int32), *(s.pos for s in found)], 1),
        )

    def newest(self, layer: int, n: int) -> Slots:
        """The n slots that each head stored last."""
        return last(self.slots(layer), n)

    def positions(self, layer: int) -> Tensor:
        """pos [K, S] of all slots, -1 = forgotten."""
        none = torch.empty(self._heads, 0, dtype=torch.int32)
        return torch.cat([none, *(extent.slots.pos for extent in self._layers[layer])], 1)

    def run(self, layer: int) -> Run | None:
        """Slots lie in several extents."""
        return None

    def final(self, layer: int, n: Tensor) -> Tensor:
        """All n [K] slots: nothing is rounded."""
        return n

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Slots index [K, M] of each head, -1 = none: no other part of the file is read, whole pages aside."""
        k, v = (torch.zeros(*index.shape, self._dim, dtype=self.dtype) for _ in "kv")
        pos, first = torch.full_like(index, -1, dtype=torch.int32), 0
        for s in (extent.slots for extent in self._layers[layer]):
            heads, to = ((index >= first) & (index < first + s.n_slots)).nonzero(as_tuple=True)
            at = index[heads, to] - first
            k[heads, to], v[heads, to], pos[heads, to] = s.k[heads, at], s.v[heads, at], s.pos[heads, at]
            first += s.n_slots
        return Slots(k, v, pos)

    def head(self, layer: int, head: int, n: int) -> Slots:
        """The first n slots of one head, as a copy in memory."""
        found = [extent.slots for extent in self._layers[layer]]
        mine = [[t[head : head + 1] for t in (s.k, s.v, s.pos)] for s in found]
        return Slots(*(torch.cat(ts, 1)[:, :n] for ts in zip(*mine, strict=True)))

    def keep(self, layer: int, mask: Tensor) -> Slots:
        """Forget slots whose mask [K, S] is False. Their place is used again once an extent is empty."""
        fell = compact(self.slots(layer), ~mask)
        shown = mask.split_with_sizes([extent.length for extent in self._layers[layer]], dim=1)
        for extent, part in zip(self._layers[layer], shown, strict=True):
            extent.pos[:, : extent.length].masked_fill_(~part, -1)
        self._sweep(layer)
        return fell

    def crop(self, n: int) -> None:
        """Forget every slot at position n or later; the place at the end of an extent is used again."""
        for layer, extents in enumerate(self._layers):
            for extent in extents:
                extent.pos.masked_fill_(extent.pos >= n, -1)
            if extents:
                live = (extents[-1].pos >= 0).any(0).nonzero()
                extents[-1].length = int(live.max()) + 1 if live.numel() else 0
            self._sweep(layer)

    def state(self) -> State:
        """By layer and extent, as mapped."""
        return {str(layer): {str(i): _state(e) for i, e in enumerate(held)} for layer, held in enumerate(self._layers)}

    def restore(self, given: Given) -> None:
        """In extents of their own, as rows read each of them apart."""
        for layer in range(len(self._layers)):
            for one in given.part(str(layer)).parts(given.n):
                pos = one.positions("pos", self._heads, None, least=-1)
                shape = self._heads, pos.shape[1], self._dim
                k, v = (one.tensor(name, self.dtype, *shape) for name in "kv")
                self._layers[layer].append(self._claim(max(1, pos.shape[1]), layer))
                self._store(layer, Slots(k, v, pos))

    def usage(self) -> list[Usage]:
        """Bytes of the file as "disk", and of the positions that are held in memory."""
        found = []
        for layer, extents in enumerate(self._layers):
            found.append(Usage(layer, "disk", self.n_slots(layer), sum(e.nbytes for e in extents)))
            found.append(Usage(layer, "cpu", 0, sum(e.pos.nbytes for e in extents)))
        return found

    @property
    def _per_slot(self) -> int:
        """Bytes of a slot of all heads."""
        return 2 * self._heads * self._dim * self.dtype.itemsize

    def _claim(self, need: int, layer: int) -> _Extent:
        """An extent with room for at least `need` slots, its blocks on the disk claimed.

        A layer takes ahead of its need no more than its part of the file, so that the last has room for as many slots.
        """
        unit = mmap.ALLOCATIONGRANULARITY  # a map begins at a multiple of it
        again = next((i for i, (_, size) in enumerate(self._free) if size >= need * self._per_slot), None)
        if again is not None:
            offset, size = self._free.pop(again)
        else:
            ahead = min(self.LARGEST, max(self.FIRST, self.n_slots(layer))) * self._per_slot
            share = part_of(self._most, len(self._layers)) - sum(e.nbytes for e in self._layers[layer])
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
        k, v = torch.frombuffer(mapped, dtype=self.dtype, count=2 * self._heads * cap * self._dim).view(
            2, self._heads, cap, self._dim
        )
        return _Extent(offset, size, k, v, torch.full((self._heads, cap), -1, dtype=torch.int32))

    def _grow(self, end: int) -> None:
        fd = self._file.fileno()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, self._end, end - self._end)
        else:
            os.ftruncate(fd, end)
        self._end = end

    def _write(self, extent: _Extent, k: Tensor, v: Tensor) -> None:
        """k, v [K, m, D] behind what the extent holds; a write says when the disk is full, a map would crash."""
        cap, row = extent.pos.shape[1], self._dim * self.dtype.itemsize
        for i, t in enumerate((k, v)):
            for j in range(self._heads):
                data = t[j].to(self.dtype).contiguous().view(torch.uint8).numpy().data.cast("B")
                at = extent.offset + ((i * self._heads + j) * cap + extent.length) * row
                while data:
                    done = os.pwrite(self._file.fileno(), data, at)
                    self.written += done
                    at, data = at + done, data[done:]

    def _sweep(self, layer: int) -> None:
        """Give back extents in which nothing is left."""
        empty = [e for e in self._layers[layer] if not bool((e.pos >= 0).any())]
        self._layers[layer] = [e for e in self._layers[layer] if not any(e is gone for gone in empty)]
        self._free += [(e.offset, e.nbytes) for e in empty]


def _state(extent: _Extent) -> State:
    s = extent.slots
    return {"k": s.k, "v": s.v, "pos": s.pos}


def part_of(most: int, n_layers: int) -> int:
    """Bytes that each layer can be sure of in a file of so many."""
    return most // n_layers // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY


def _places(extents: list[_Extent], n: int) -> list[tuple[_Extent, int, int]]:
    """Which of n slots go to which extent: those from a to b - 1, in order, as far as there is room."""
    found, a = [], 0
    for extent in extents:
        b = a + min(extent.room, n - a)
        if b > a:
            found.append((extent, a, b))
        a = b
    return found
