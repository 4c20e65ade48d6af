"""Where Recall reads slots: some of them, by their place in a tier."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvcli.kv.slots import Slots, Tier


class Source(Protocol):
    """Slots of a tier by their index. Whoever packs slots or holds them elsewhere can serve few of them cheaply."""

    def positions(self, layer: int) -> Tensor:
        """pos [K, S] of all slots, -1 = empty."""

    def keys(self, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Slots index [K, M] of each head, -1 = none -> k [K, M, D], finite everywhere, and pos [K, M]."""

    def gather(self, layer: int, index: Tensor) -> Slots:
        """The same with values."""

    def head(self, layer: int, head: int, n: int) -> Slots:
        """The first n slots of one head: k, v [1, n, D], pos [1, n]."""

    def warm(self, layer: int, index: Tensor) -> None:
        """Slots index [K, M] will probably be asked for before the pass is over."""


class Whole:
    """Any tier, by the slots that it shows. Cheap where they lie in one piece; where heads differ, or slots are packed,
    showing them copies the layer, in every pass."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def positions(self, layer: int) -> Tensor:
        """As the tier has them."""
        return self._tier.slots(layer).pos

    def keys(self, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Copied."""
        s = self._tier.slots(layer)
        index = index.to(s.pos.device)
        return _take(s.k, index), _places(s, index)

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Copied."""
        s = self._tier.slots(layer)
        index = index.to(s.pos.device)
        return Slots(_take(s.k, index), _take(s.v, index), _places(s, index))

    def head(self, layer: int, head: int, n: int) -> Slots:
        """The tier's own."""
        s = self._tier.slots(layer)
        return Slots(*(t[head : head + 1, :n] for t in (s.k, s.v, s.pos)))

    def warm(self, layer: int, index: Tensor) -> None:
        """They are at hand."""
        return


def _take(t: Tensor, index: Tensor) -> Tensor:
    """[K, S, D], [K, M] -> [K, M, D]; head by head, where rows are copied whole."""
    out = t.new_empty(*index.shape, t.shape[2])
    at = index.clamp(min=0)
    for j in range(t.shape[0]):
        torch.index_select(t[j], 0, at[j], out=out[j])
    return out


def _places(s: Slots, index: Tensor) -> Tensor:
    return s.pos.gather(1, index.clamp(min=0)).masked_fill(index < 0, -1)
