"""What rows read of a far tier, kept where they are computed, and what they may read next, fetched ahead.

Neighbouring tokens want mostly the same pages, and the rows of a draft ask for those of the tokens to come. Pages that
were nearly chosen fly while others are read: they are the likeliest to be chosen next. None of it changes what is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcli.kv.slots import Slots, picked

NONE = torch.iinfo(torch.int64).max  # an index behind all others
Arrival = Callable[[], Slots]


class RemoteTier(Protocol):
    """A tier across the bus."""

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Slots index [K, M] of each head, -1 = none."""

    def gather_async(self, layer: int, index: Tensor) -> Arrival:
        """The same, on its way: the answer gives it, in order with what the device is told from then on."""


@dataclass(frozen=True, slots=True)
class _Held:
    index: Tensor  # [K, M] rising, NONE last
    slots: Slots

    def place(self, index: Tensor) -> Tensor:
        """[K, M]: where these slots, -1 = none, are held; -1 where they are not."""
        at = torch.searchsorted(self.index, index.contiguous()).clamp(max=max(0, self.index.shape[1] - 1))
        return at.masked_fill((index < 0) | (self.index.gather(1, at) != index), -1)


class PageCache:
    """Slots of `far` by their index, as long as they do not change: `forget` says when they may have."""

    def __init__(self, far: RemoteTier) -> None:
        self._far = far
        self._held: dict[int, _Held] = {}
        self._coming: dict[int, tuple[Tensor, Arrival]] = {}
        self.asked = self.found = 0  # slots of all heads that rows wanted, and those that were here
        self.flown = 0  # fetched ahead

    def gather(self, layer: int, index: Tensor, ahead: Tensor | None = None) -> Slots:
        """Slots index [K, M] of each head, -1 = none. `ahead` [K, A]: those to have here next time."""
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
        """Slots of this layer may have moved or changed."""
        self._held.pop(layer, None)
        if layer in self._coming:
            self._coming.pop(layer)[1]()  # what is still on its way needs the room that it comes to

    def nbytes(self, layer: int) -> int:
        """What is kept of this layer."""
        if (held := self._held.get(layer)) is None:
            return 0
        s = held.slots
        return sum(t.nbytes for t in (held.index, s.k, *([] if s.v is s.k else [s.v]), s.pos))

    def _arrived(self, layer: int, index: Tensor) -> _Held | None:
        """What is here, with what came since the last pass."""
        held = self._held.get(layer)
        if held is not None and layer in self._coming:
            came, arrival = self._coming.pop(layer)
            held = _sorted(torch.cat([held.index, came], 1), _beside(held.slots, arrival()))
        return held

    def _fill(self, layer: int, got: Slots, missing: Tensor) -> None:
        """Put the slots `missing` [K, M], -1 = none, into their places."""
        lacks = missing >= 0
        if (packed := _packed(missing)) is None:
            return
        new = self._far.gather(layer, packed)
        heads, to = lacks.nonzero(as_tuple=True)
        rank = (lacks.cumsum(1) - 1)[heads, to]
        for t, fresh in {id(t): (t, of) for t, of in ((got.k, new.k), (got.v, new.v), (got.pos, new.pos))}.values():
            t[heads, to] = fresh[heads, rank].to(t)

    def _hold(self, layer: int, index: Tensor, got: Slots, held: _Held | None, ahead: Tensor | None) -> None:
        """What was read; of what is wanted ahead what is here, and the rest sets out."""
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
    """[K, M], -1 = none -> the same in their order, as narrow as can be, -1 behind them; None where there are none."""
    gone = index < 0
    count = int((~gone).sum(1).max()) if index.numel() else 0
    order = gone.to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
    return index.gather(1, order) if count else None
