"""The dense tier: keys and values in full precision, on any device, one buffer per layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import NewRows, StoredKV, why_not
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import (
    AttentionParams,
    LayerShape,
    Masks,
    Slots,
    Usage,
    Window,
    Windows,
    compact,
    empty,
    on_host,
    storing_layer_of,
)
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.tiers.dense_layer import DenseLayer
from kvcli.kv.tiers.device_tables import DeviceCache


class Dense:
    """A tier of keys and values in full precision.

    A layer grows in small steps, because attention also reads the spare capacity (finite
    numbers, hidden by their position). Any device, float type and layer shape is supported. A layer that shares the
    slots of another layer reads them and stores none. Layers with a sliding window evict hidden slots at compression
    points; `reaches` is then False for earlier rows.
    """

    gather_async = None
    forgets = True
    STEP = 256  # slots; copying 16k slots every 256 tokens costs 0.3 % of decoding them

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        step: int = STEP,
        windows: Mapping[int, Window] | None = None,
    ) -> None:
        """`shapes`: by layer; `step`: slots by which a layer grows; `windows`: of layers that keep only a window."""
        self.dtype = dtype
        self.changes = 0
        self._step, self._shapes = step, shapes
        self.windows = Windows(windows or {})
        self._holder = storing_layer_of(shapes)
        self._slabs: dict[int, DenseLayer] = {
            layer: DenseLayer(
                Slots(*empty(shape, dtype, shape.device or device), torch.empty(shape.n_kv_heads, 0)),
                step,
                layer in self.windows,
            )
            for layer, shape in enumerate(shapes)
            if shape.shared_from is None
        }
        assert all(holder in self._slabs for holder in self._holder), "a layer shares the KV of a layer without KV"

    @property
    def batch_variant_reason(self) -> str:
        """Return "kv.dtype" if no batch-invariant kernel supports data type and head size."""
        sizes = {(slab.k.device, slab.k.shape[-1], slab.v.shape[-1]) for slab in self._slabs.values()}
        return "kv.dtype" if any(why_not(self.dtype, *each) for each in sizes) else ""

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N] over slots and new KV, merged if possible."""
        return self._read(layer).attend(q, params, pos, own)

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return the device tables of all layers, with capacity for `rows` more slots per head."""
        tables = {layer: slab.device_tables(rows, more) for layer, slab in self._slabs.items()}
        return DeviceCache([tables[holder] for holder in self._holder], list(tables), self._grew)

    def device_layer(self, layer: int) -> str:
        return "a dense tier lies below another one"

    def _grew(self, n: int, start: int) -> None:
        for slab in self._slabs.values():
            slab.grew(n, start)

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] in all heads at positions from `start` on."""
        if k.shape[1]:
            self._slabs[layer].append(k, v, start)
            self.windows.came(layer, start)

    def take(self, layer: int, slots: Slots) -> None:
        """Store slots that bring their own positions, which may differ by head."""
        if not bool((slots.pos >= 0).any()):
            return
        self._slabs[layer].take(self._own(layer, slots))
        self.windows.came(layer, 0)
        self.changes += 1

    def n_slots(self, layer: int) -> int:
        """Return the number of slots of the longest head."""
        return self._read(layer).length

    def slots(self, layer: int) -> Slots:
        """Return the slots of a layer: views of its buffer, or a copy if heads differ."""
        return self._read(layer).slots()

    def newest(self, layer: int, n: int) -> Slots:
        """Return the n slots that each head stored last."""
        return self._read(layer).newest(n)

    def positions(self, layer: int) -> Tensor:
        """Return pos [K, S] of all slots, -1 = empty."""
        return self._read(layer).positions()

    def run(self, layer: int) -> StoredKV | None:
        """Return the stored slots in place."""
        return self._read(layer).run()

    def n_stable(self, layer: int, n: Tensor) -> Tensor:
        """Return n [K]: no slot will be quantized."""
        return n

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Return a copy of slots index [K, M] of each head, -1 = empty."""
        return self._read(layer).gather(index)

    def head(self, layer: int, head: int, n: int) -> Slots:
        """Return the first n slots of one head."""
        return self._read(layer).head(head, n)

    def evict_except(self, layer: int, mask: Tensor) -> Slots:
        """Evict slots whose mask [K, S] is False, free their memory and return them."""
        before = self._slabs[layer].slots()
        fell = compact(before, ~mask)  # first, because the layer may be changed in place
        self._forget(layer, before, mask)
        return fell

    def put(self, layer: int, slots: Slots) -> None:
        """Replace the slots of a layer. The tier keeps the given tensors, if no pass was captured over the layer."""
        self._hold(layer, self._own(layer, slots))

    def crop(self, n: int) -> None:
        """Remove every slot at position n or later, to rewind the sequence. The memory stays allocated."""
        self.changes += 1
        self.windows.clear()
        for layer, slab in self._slabs.items():
            if not slab.crop(n):
                before = slab.slots()
                self._forget(layer, before, before.pos < n)

    def reserve(self, n: int, layers: Iterable[int] | None = None) -> None:
        """Allocate capacity for n slots per head in layers without a window, so that growth copies nothing there."""
        for layer in self._owners(layers):
            if layer not in self.windows:
                self._slabs[layer].reserve(n)

    def reaches(self, n: int) -> bool:
        """True if, after `crop(n)`, a row at position n finds every slot inside its sliding windows."""
        return self.windows.reaches(n, lambda layer: [self.positions(layer)])

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        """Evict the slots that masks do not keep, and those that windows hide from rows at `end` and later.

        The masks of all layers take a single device synchronization.
        """
        chosen = {layer: mask for layer, mask in enumerate(masks) if mask is not None}
        kept = {layer: self.positions(layer).int().where(mask, -1) for layer, mask in chosen.items()}
        has_lost = False
        for layer, pos in on_host(kept).items():
            if np.count_nonzero(pos.numpy() >= 0) < self._slabs[layer].total:
                self._hold(layer, compact(replace(self._slabs[layer].slots(), pos=pos), pos >= 0))
                has_lost = True
        for layer in self._owners(layers):
            self.evict_below(layer, end)
        return has_lost

    def evict_below(self, layer: int, end: int) -> int:
        """Evict, below the position that is returned, the slots that a window hides from rows at `end` on; 0 = none."""
        if low := self.windows.eviction_bound(layer, end):
            slab = self._slabs[layer]
            if not slab.evict_below(low):
                slots = slab.slots()
                self._forget(layer, slots, slots.pos >= low)
            self.changes += 1
        return low

    def snapshot(self) -> State:
        """Return the snapshots of all layers."""
        return {str(layer): slab.state() for layer, slab in self._slabs.items()}

    def restore(self, given: SnapshotReader) -> None:
        """Restore each layer in its former layout."""
        for layer, slab in self._slabs.items():
            of = given.part(str(layer)), self._shapes[layer], slab.k, self._step
            self._slabs[layer] = DenseLayer.made(*of, layer in self.windows)
        self.changes += 1

    def usage(self) -> list[Usage]:
        """Return slots and bytes of each layer, spare capacity included."""
        return [
            Usage(layer, slab.k.device.type, slab.length, sum(t.untyped_storage().nbytes() for t in slab.tensors))
            for layer, slab in self._slabs.items()
        ]

    def _owners(self, layers: Iterable[int] | None) -> Iterable[int]:
        """Return the storing layers among `layers`; None = all layers."""
        return self._slabs if layers is None else filter(self._slabs.__contains__, layers)

    def _read(self, layer: int) -> DenseLayer:
        return self._slabs[self._holder[layer]]

    def _forget(self, layer: int, before: Slots, mask: Tensor) -> None:
        if bool(((before.pos >= 0) & ~mask).any()):
            self._hold(layer, compact(before, mask))

    def _hold(self, layer: int, slots: Slots) -> None:
        """Replace the slots of a layer, in place if a pass was captured over it."""
        assert layer in self._slabs, "this layer stores no slots: it shares those of another layer"
        if not self._slabs[layer].refill(slots):
            self._slabs[layer] = DenseLayer(slots, self._step, layer in self.windows)
        self.changes += 1

    def _own(self, layer: int, slots: Slots) -> Slots:
        """Return slots as this tier stores them: keys and values as one tensor if they are equal (MLA)."""
        return Slots(slots.k, slots.k, slots.pos) if self._shapes[layer].rank else slots
