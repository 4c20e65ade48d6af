"""The disk tier: keys and values in a private temporary file, read through the page cache.

What the file is, and how its room is given out: extents.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_rows import WIDEST, Own, Run, attend_part, serves, why_not
from kvcli.kernels.merge import Part
from kvcli.kv.extents import Extent, SlotFile
from kvcli.kv.shortage import Shortage
from kvcli.kv.slots import Sight, Slots, Usage, alone, compact, last, run_of, visible
from kvcli.kv.state import Given, State


class Disk:
    """Keys and values in a file of at most `most` bytes, in the numbers `dtype`; read and computed on the CPU."""

    is_far = False  # the page cache keeps it

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
        self._heads, self._dim = n_kv_heads, head_dim
        self._sizes = most, writes
        self._file = SlotFile(n_layers, n_kv_heads, head_dim, dtype, most, writes, folder)
        self._layers: list[list[Extent]] = [[] for _ in range(n_layers)]

    def __deepcopy__(self, memo: dict[int, object]) -> Disk:
        """A file of its own with the same slots in the same places, forgotten ones too."""
        n_layers = len(self._layers)
        new = Disk(n_layers, self._heads, self._dim, self.dtype, *self._sizes, self._file.folder)
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
        self._file.may_write(n)
        room, fresh = min(n, held[-1].room) if held else 0, list[Extent]()  # slots
        try:
            if room < n:
                fresh.append(self._file.claim(n - room, held))
            places = [(extent, 0, room) for extent in held[-1:] if room] + [(extent, room, n) for extent in fresh]
            for extent, a, b in places:
                self._file.write(extent, s.k[:, a:b], s.v[:, a:b])
        except BaseException as error:
            self._file.give_back(fresh)
            if isinstance(error, OSError):
                raise Shortage("the disk is full", lines=[f"{self._file.folder}: {error.strerror}"]) from error
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
        return {str(layer): {str(i): e.state() for i, e in enumerate(held)} for layer, held in enumerate(self._layers)}

    def restore(self, given: Given) -> None:
        """In extents of their own, as rows read each of them apart."""
        for layer in range(len(self._layers)):
            for one in given.part(str(layer)).parts(given.n):
                pos = one.positions("pos", self._heads, None, least=-1)
                shape = self._heads, pos.shape[1], self._dim
                k, v = (one.tensor(name, self.dtype, *shape) for name in "kv")
                self._layers[layer].append(self._file.claim(max(1, pos.shape[1]), self._layers[layer]))
                self._store(layer, Slots(k, v, pos))

    def usage(self) -> list[Usage]:
        """Bytes of the file as "disk", and of the positions that are held in memory."""
        found = []
        for layer, extents in enumerate(self._layers):
            found.append(Usage(layer, "disk", self.n_slots(layer), sum(e.nbytes for e in extents)))
            found.append(Usage(layer, "cpu", 0, sum(e.pos.nbytes for e in extents)))
        return found

    def _sweep(self, layer: int) -> None:
        """Give back extents in which nothing is left."""
        empty = [e for e in self._layers[layer] if not bool((e.pos >= 0).any())]
        self._layers[layer] = [e for e in self._layers[layer] if not any(e is gone for gone in empty)]
        self._file.give_back(empty)
