"""The dense tier: keys and values in full precision, on any device, one slab per layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import NewRows, StoredKV, why_not
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.sliding_windows import Window, Windows
from kvcli.kv.slots import (
    AttentionParams,
    LayerShape,
    Masks,
    Slots,
    Usage,
    compact,
    empty,
    empty_like,
    on_host,
    storing_layer_of,
)
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.kv.tiers.dense_ragged import RaggedLayer
from kvcli.kv.tiers.dense_uniform import UniformLayer, agree
from kvcli.kv.tiers.device_tables import DeviceCache, DeviceLayer


class DenseLayer(Protocol):
    """How one layer lies in memory."""

    k: Tensor  # [.., D]
    v: Tensor  # [.., E]

    @property
    def length(self) -> int:
        """Slots of the longest head."""

    @property
    def total(self) -> int:
        """Slots of all heads."""

    @property
    def tensors(self) -> list[Tensor]:
        """All that takes memory."""

    def state(self) -> State:
        """What is held; one row of positions "pos" where heads hold the same."""

    def attend(
        self, q: Tensor, sight: AttentionParams, rows: Sequence[int], own: NewRows | None
    ) -> list[PartialAttention]:
        """Rows over what is held, and over their pass."""

    def run(self) -> StoredKV:
        """The slots where they lie."""

    def fixed(self, rows: int, more: int = 0) -> DeviceLayer:
        """Where a device finds the slots, and room for `rows` behind those of each head, as `ahead` makes it."""

    def grew(self, n: int, start: int) -> None:
        """A device stored n slots more in all heads, at positions from `start` on."""

    def refill(self, slots: Slots) -> bool:
        """Hold these, a copy, in place of all, where passes were recorded over it; False, and nothing done, elsewhere
        or where they do not suit it."""

    def append(self, k: Tensor, v: Tensor, start: int) -> None:
        """Store the same rows in all heads, at positions from `start` on."""

    def take(self, slots: Slots) -> bool:
        """Store slots of which heads bring different ones; False, and nothing done, if this form cannot."""

    def slots(self) -> Slots:
        """What is held, padded."""

    def newest(self, n: int) -> Slots:
        """The n slots that each head stored last."""

    def positions(self) -> Tensor:
        """pos [K, S], -1 = empty."""

    def gather(self, index: Tensor) -> Slots:
        """Slots index [K, M] of each head, -1 = none, as a copy."""

    def head(self, head: int, n: int) -> Slots:
        """The first n slots of one head."""

    def crop(self, n: int) -> bool:
        """Forget positions n and later in place; False, and nothing done, if this form cannot."""

    def evict_below(self, low: int) -> bool:
        """Forget positions below `low` in place, by whole blocks; False, and nothing done, if this form cannot."""

    def reserve(self, n: int) -> None:
        """Room for n slots a head."""


class Dense:
    """Keys and values in full precision.

    While all heads of a layer hold the same slots they share one row of positions; once they differ, each head takes
    the room of its own. Grows in small steps, one layer at a time: the spare room is read along with the slots (finite,
    hidden by their place), so there is little of it. Refuses nothing: any device, any float type, layers of any shape.
    A layer that shares another's slots reads them and holds none; nothing may be stored in it, or taken from it.
    Layers with a window give back at boundaries what no later row sees; rows that stand further back are then refused
    by `reaches`.
    """

    is_far = False
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
        """`shapes`: by layer; `step`: slots by which a layer grows; `windows`: by layer that keeps its own only."""
        self.dtype = dtype
        self.changes = 0
        self._step, self._shapes = step, shapes
        self.windows = Windows(windows or {})
        self._holder = storing_layer_of(shapes)
        self._slabs: dict[int, DenseLayer] = {
            layer: UniformLayer(
                *empty(shape, dtype, shape.device or device),
                pos=torch.empty(1, 0, dtype=torch.int32),
                step=step,
                slides=layer in self.windows,
            )
            for layer, shape in enumerate(shapes)
            if shape.shared_from is None
        }
        assert all(holder in self._slabs for holder in self._holder), "a shared layer has slots of its own"

    @property
    def batch_variant_reason(self) -> str:
        """Where native kernels do not serve its numbers."""
        sizes = {(held.k.device, held.k.shape[-1], held.v.shape[-1]) for held in self._slabs.values()}
        return "kv.dtype" if any(why_not(self.dtype, *each) for each in sizes) else ""

    def attend(
        self, layer: int, q: Tensor, sight: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """q [H, N, D] of rows at positions pos [N] -> in one part what is held and their pass, where that can be."""
        return self._read(layer).attend(q, sight, pos, own)

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """All of it, with room for `rows` slots a head."""
        lying = {layer: held.fixed(rows, more) for layer, held in self._slabs.items()}
        return DeviceCache([lying[holder] for holder in self._holder], list(lying), self._grew)

    def _grew(self, n: int, start: int) -> None:
        for held in self._slabs.values():
            held.grew(n, start)

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] at positions from `start` on; every head takes all of them."""
        if k.shape[1]:
            self._slabs[layer].append(k, v, start)
            self.windows.came(layer, start)

    def take(self, layer: int, slots: Slots) -> None:
        """Store slots that another tier let go."""
        if not bool((slots.pos >= 0).any()):
            return
        own, held = self._own(layer, slots), self._slabs[layer]
        if not held.take(own):
            held = RaggedLayer(held.slots(), self._step)
            held.take(own)
            self._slabs[layer] = held
        self.windows.came(layer, 0)
        self.changes += 1

    def n_slots(self, layer: int) -> int:
        """Slots of the longest head."""
        return self._read(layer).length

    def slots(self, layer: int) -> Slots:
        """Slots of this layer: views of the slab, or a copy if heads differ."""
        return self._read(layer).slots()

    def newest(self, layer: int, n: int) -> Slots:
        """The n slots that each head stored last."""
        return self._read(layer).newest(n)

    def positions(self, layer: int) -> Tensor:
        """pos [K, S] of all slots, -1 = empty."""
        return self._read(layer).positions()

    def run(self, layer: int) -> StoredKV | None:
        """The slots where they lie."""
        return self._read(layer).run()

    def n_stable(self, layer: int, n: Tensor) -> Tensor:
        """All n [K] slots: nothing is rounded."""
        return n

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Slots index [K, M] of each head, -1 = none: a copy."""
        return self._read(layer).gather(index)

    def head(self, layer: int, head: int, n: int) -> Slots:
        """The first n slots of one head."""
        return self._read(layer).head(head, n)

    def keep(self, layer: int, mask: Tensor) -> Slots:
        """Forget slots whose mask [K, S] is False and give their memory back; returns what fell out."""
        before = self._slabs[layer].slots()
        has_lost = self._forget(layer, before, mask)
        return compact(before, ~mask) if has_lost else empty_like(before)

    def put(self, layer: int, slots: Slots) -> None:
        """Hold these slots instead; their tensors become the tier's own."""
        self._hold(layer, self._own(layer, slots))

    def crop(self, n: int) -> None:
        """Forget every slot at position n or later, keeping the memory for what follows: an undo, not an eviction."""
        self.changes += 1
        self.windows.clear()
        for layer, held in self._slabs.items():
            if not held.crop(n):
                before = held.slots()
                self._forget(layer, before, before.pos < n)

    def reserve(self, n: int, layers: Iterable[int] | None = None) -> None:
        """Room for n slots a head in those that keep so many, so that reading that many moves nothing there."""
        for layer in self._owners(layers):
            if layer not in self.windows:
                self._slabs[layer].reserve(n)

    def reaches(self, n: int) -> bool:
        """Whether a row at position n finds all that it sees, once `crop(n)` has made it the next one."""
        return self.windows.reaches(n, lambda layer: [self.positions(layer)])

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        """Evict, layer by layer, what the masks let go and what windows hide from rows at `end` and later.

        The device is asked once, for all layers.
        """
        chosen = {layer: mask for layer, mask in enumerate(masks) if mask is not None}
        kept = {layer: self.positions(layer).int().where(mask, -1) for layer, mask in chosen.items()}
        has_lost = False
        for layer, pos in on_host(kept).items():
            if np.count_nonzero(pos.numpy() >= 0) < self._slabs[layer].total:
                kept_ones = compact(replace(self._slabs[layer].slots(), pos=pos), pos >= 0)
                if self._slabs[layer].refill(kept_ones):
                    self.changes += 1
                else:
                    self._hold(layer, kept_ones)
                has_lost = True
        for layer in self._owners(layers):
            self.evict_below(layer, end)
        return has_lost

    def evict_below(self, layer: int, end: int) -> int:
        """Forget positions that a window hides from rows at `end` and later: those below the answer; 0 = none."""
        if low := self.windows.evict_below(layer, end):
            held = self._slabs[layer]
            if not held.evict_below(low):
                slots = held.slots()
                self._forget(layer, slots, slots.pos >= low)
            self.changes += 1
        return low

    def snapshot(self) -> State:
        """By layer."""
        return {str(layer): held.state() for layer, held in self._slabs.items()}

    def restore(self, given: SnapshotReader) -> None:
        """Each layer in the form that it had."""
        for layer, held in self._slabs.items():
            part = given.part(str(layer))
            of = part, self._shapes[layer], held.k, self._step
            self._slabs[layer] = (
                UniformLayer.made(*of, layer in self.windows) if "pos" in part else RaggedLayer.made(*of)
            )
        self.changes += 1

    def usage(self) -> list[Usage]:
        """Slots and bytes of each layer, spare room included."""
        return [
            Usage(layer, held.k.device.type, held.length, sum(t.untyped_storage().nbytes() for t in held.tensors))
            for layer, held in self._slabs.items()
        ]

    def _owners(self, layers: Iterable[int] | None) -> Iterable[int]:
        """Of these layers, those that store; None = of all."""
        return self._slabs if layers is None else filter(self._slabs.__contains__, layers)

    def _read(self, layer: int) -> DenseLayer:
        return self._slabs[self._holder[layer]]

    def _forget(self, layer: int, before: Slots, mask: Tensor) -> bool:
        if has_lost := bool(((before.pos >= 0) & ~mask).any()):
            self._hold(layer, compact(before, mask))
        return has_lost

    def _hold(self, layer: int, slots: Slots) -> None:
        """In the form that fits."""
        assert layer in self._slabs, "this layer reads another's slots"
        is_alike, slides = agree(slots), layer in self.windows
        self._slabs[layer] = UniformLayer.of(slots, self._step, slides) if is_alike else RaggedLayer(slots, self._step)
        self.changes += 1

    def _own(self, layer: int, slots: Slots) -> Slots:
        """Slots from anywhere as they are to lie: once, where keys are values."""
        return Slots(slots.k, slots.k, slots.pos) if self._shapes[layer].rank else slots
