"""Page cache: the selected pages of an offloaded tier, kept on the compute device, with prefetch of likely pages.

Neighbouring tokens select mostly the same pages, and draft rows select the pages of later tokens. The best pages that
were not selected are the likeliest to be selected next, so they are copied while others are read. The page cache never
changes the selection or the values that rows read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcli.kv.slots import Slots, picked

NONE = torch.iinfo(torch.int64).max  # sorts after all slot indices
Arrival = Callable[[], Slots]


class RemoteTier(Protocol):
    """A tier across the link to the device."""

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Return a copy of slots index [K, M] of each head, -1 = none."""

    def gather_async(self, layer: int, index: Tensor) -> Arrival:
        """Start the copy; return a function that returns the slots, for device operations queued after its call."""


@dataclass(frozen=True, slots=True)
class _Held:
    index: Tensor  # [K, M] ascending, NONE last
    slots: Slots

    def place(self, index: Tensor) -> Tensor:
        """Return [K, M]: where the page cache holds slots `index`, -1 = none; -1 if it does not hold a slot."""
        at = torch.searchsorted(self.index, index.contiguous()).clamp(max=max(0, self.index.shape[1] - 1))
        return at.masked_fill((index < 0) | (self.index.gather(1, at) != index), -1)


class PageCache:
    """Page cache of a remote tier, by slot index. `forget` must be called when slots may have changed."""

    def __init__(self, far: RemoteTier) -> None:
        self._far = far
        self._held: dict[int, _Held] = {}
        self._coming: dict[int, tuple[Tensor, Arrival]] = {}
        self.asked = self.found = 0  # slots requested, over all heads, and cache hits among them
        self.flown = 0  # slots prefetched

    def gather(self, layer: int, index: Tensor, ahead: Tensor | None = None) -> Slots:
        """Return slots index [K, M] of each head, -1 = none. `ahead` [K, A]: slots to prefetch for the next pass."""
        held = self._arrived(layer, index)
        if held is None:
            got = self._far.gather(layer, index)
        else:
            place = held.place(index)
            got = picked(held.slots, place)
            self._fill(layer, got, index.masked_fill(place >= 0, -1))
            self.found += int((place >= 0).sum())
        self.asked += int((index >= 0).sum())
        self._hold(layer, index, got, held, ahead)
        return got

    def forget(self, layer: int) -> None:
        """Drop the cached slots of this layer, because slots may have moved or changed."""
        self._held.pop(layer, None)
        if layer in self._coming:
            self._coming.pop(layer)[1]()  # a pending copy still needs its target buffer

    def nbytes(self, layer: int) -> int:
        """Return the bytes of this layer in the page cache."""
        if (held := self._held.get(layer)) is None:
            return 0
        s = held.slots
        return sum(t.nbytes for t in (held.index, s.k, *([] if s.v is s.k else [s.v]), s.pos))

    def _arrived(self, layer: int, index: Tensor) -> _Held | None:
        """Return the cached slots, including slots prefetched since the last pass; None if nothing is cached."""
        held = self._held.get(layer)
        if held is not None and layer in self._coming:
            came, arrival = self._coming.pop(layer)
            held = _sorted(torch.cat([held.index, came], 1), _beside(held.slots, arrival()))
        return held

    def _fill(self, layer: int, got: Slots, missing: Tensor) -> None:
        """Fetch the slots `missing` [K, M], -1 = none, and write them into `got`."""
        lacks = missing >= 0
        if (packed := _packed(missing)) is None:
            return
        new = self._far.gather(layer, packed)
        heads, to = lacks.nonzero(as_tuple=True)
        rank = (lacks.cumsum(1) - 1)[heads, to]
        for t, fresh in {id(t): (t, of) for t, of in ((got.k, new.k), (got.v, new.v), (got.pos, new.pos))}.values():
            t[heads, to] = fresh[heads, rank].to(t)

    def _hold(self, layer: int, index: Tensor, got: Slots, held: _Held | None, ahead: Tensor | None) -> None:
        """Cache the slots just read and the cached slots of `ahead`; start to prefetch the other slots of `ahead`."""
        if ahead is not None and held is not None:
            place = held.place(ahead)
            index = torch.cat([index, ahead.masked_fill(place < 0, -1)], 1)
            got = _beside(got, picked(held.slots, place))
            ahead = ahead.masked_fill(place >= 0, -1)
        self._held[layer] = _sorted(index, got)
        if ahead is not None and (packed := _packed(ahead)) is not None:
            self._coming[layer] = packed.masked_fill(packed < 0, NONE), self._far.gather_async(layer, packed)
            self.flown += int((packed >= 0).sum())


def _sorted(index: Tensor, s: Slots) -> _Held:
    order = index.masked_fill(index < 0, NONE).sort(1)
    return _Held(order.values, picked(s, order.indices))


def _beside(a: Slots, b: Slots) -> Slots:
    k = torch.cat([a.k, b.k], 1)
    return Slots(k, k if a.v is a.k else torch.cat([a.v, b.v], 1), torch.cat([a.pos, b.pos.to(a.pos)], 1))


def _packed(index: Tensor) -> Tensor | None:
    """Move the indices of [K, M], -1 = none, to the front in order, cut to the longest head; None if there are none."""
    gone = index < 0
    count = int((~gone).sum(1).max()) if index.numel() else 0
    order = gone.to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
    return index.gather(1, order) if count else None
