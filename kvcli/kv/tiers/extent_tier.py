"""A tier of extents that never move, in a file (disk.py) or in host memory (pinned_host.py).

Attention runs on each extent and the partial results are merged. A layer grows by further extents, without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import NewRows, StoredKV, why_not
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.offload.host_access import HostChunk
from kvcli.kv.slots import (
    AttentionParams,
    LayerShape,
    Slots,
    attend_new_only,
    compact,
    concat_slots,
    empty,
    last,
    run_of,
    storing_layer_of,
)
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.tiers.extents import Extent, ExtentStorage


class ExtentTier:
    """A tier of keys and values of type `dtype` in extents that the host can read; attention runs on the CPU."""

    is_far = False

    def __init__(self, shapes: Sequence[LayerShape], dtype: torch.dtype, place: ExtentStorage) -> None:
        """`shapes`: by layer; a layer that reads the slots of another layer stores none."""
        self.dtype = dtype
        self._shapes, self._place, self._holder = shapes, place, storing_layer_of(shapes)
        self._layers: list[list[Extent]] = [[] for _ in shapes]
        self._pieces: dict[int, list[HostChunk]] = {}  # by layer, until its slots change

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
        parts = [e.read(e.k, e.v, q, params, pos) for e in self._layers[self._holder[layer]] if e.length]
        return [*parts, *attend_new_only(q, params, own)]

    def pieces(self, layer: int) -> list[HostChunk]:
        """Return the extents that `attend` reads as host chunks. They are cached until slots change."""
        if layer not in self._pieces:
            held = [(e, e.slots) for e in self._layers[layer] if e.length]
            self._pieces[layer] = [
                HostChunk((s.k,), partial(_of_keys, e.read), e.unreached)
                if s.v is s.k
                else HostChunk((s.k, s.v), e.read, e.unreached)
                for e, s in held
            ]
        return self._pieces[layer]

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] in all heads at positions from `start` on."""
        self.take(layer, Slots(k, v, run_of(start, k.shape[1], k.shape[0], k.device)))

    def take(self, layer: int, slots: Slots) -> None:
        """Store slots. Stores all of them, or none and raises CacheFull."""
        self._store(layer, compact(slots, slots.pos >= 0) if bool((slots.pos < 0).any()) else slots)

    def _store(self, layer: int, s: Slots) -> None:
        """Store slots without compacting them."""
        n, held = s.n_slots, self._layers[layer]
        assert self._holder[layer] == layer, "this layer shares the KV of another"
        self._place.may_write(layer, n)
        at = min(n, held[-1].room) if held else 0
        places, fresh = [(held[-1], 0, at)] if at else [], list[Extent]()
        try:
            while at < n:
                fresh.append(self._place.allocate(layer, n - at, [*held, *fresh]))
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
        held += fresh
        self._pieces.pop(layer, None)

    def n_slots(self, layer: int) -> int:
        """Return the slots of the longest head, including evicted slots in extents that are not empty."""
        return sum(extent.length for extent in self._layers[self._holder[layer]])

    def slots(self, layer: int) -> Slots:
        """Return the slots of a layer: a copy in memory, or views of the mapping if there is one extent."""
        found = [extent.slots for extent in self._layers[self._holder[layer]]]
        if len(found) == 1:
            return found[0]
        return concat_slots([self._none(layer), *found])

    def newest(self, layer: int, n: int) -> Slots:
        """Return the n slots that each head stored last."""
        return last(self.slots(layer), n)

    def positions(self, layer: int) -> Tensor:
        """Return pos [K, S] of all slots, -1 = evicted."""
        return torch.cat(
            [self._none(layer).pos, *(extent.slots.pos for extent in self._layers[self._holder[layer]])], 1
        )

    def run(self, layer: int) -> StoredKV | None:
        """Return None: slots are in several extents."""
        return None

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

    def keep(self, layer: int, mask: Tensor) -> Slots:
        """Evict slots whose mask [K, S] is False and return them. Their space is reused once an extent is empty."""
        fell = compact(self.slots(layer), ~mask)
        shown = mask.split_with_sizes([extent.length for extent in self._layers[layer]], dim=1)
        for extent, part in zip(self._layers[layer], shown, strict=True):
            extent.pos[:, : extent.length].masked_fill_(~part, -1)
            self._tidy(extent)
        self._sweep(layer)
        return fell

    def crop(self, n: int) -> None:
        """Remove every slot at position n or later; space at the end of a layer's last extent is reused."""
        for layer, extents in enumerate(self._layers):
            for extent in extents:
                extent.pos.masked_fill_(extent.pos >= n, -1)
            if extents:
                live = (extents[-1].pos >= 0).any(0).nonzero()
                extents[-1].length = int(live.max()) + 1 if live.numel() else 0
            for extent in extents:
                self._tidy(extent)
            self._sweep(layer)

    def snapshot(self) -> State:
        """Return a snapshot by layer and extent: views of the mappings."""
        return {str(layer): {str(i): e.state() for i, e in enumerate(held)} for layer, held in enumerate(self._layers)}

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

    def _sweep(self, layer: int) -> None:
        """Free empty extents."""
        empty = [e for e in self._layers[layer] if not bool((e.pos >= 0).any())]
        self._layers[layer] = [e for e in self._layers[layer] if not any(e is gone for gone in empty)]
        self._place.free(empty)
        self._pieces.pop(layer, None)

    def _tidy(self, extent: Extent) -> None:
        self._place.tidy(extent)
        extent.note()

    def _none(self, layer: int) -> Slots:
        shape = self._shapes[layer]
        return Slots(*empty(shape, self.dtype), torch.empty(shape.n_kv_heads, 0, dtype=torch.int32))


def _of_keys(read: Callable[..., PartialAttention], k: Tensor, *asked: Any) -> PartialAttention:
    """Read keys as values too (MLA)."""
    return read(k, k, *asked)
