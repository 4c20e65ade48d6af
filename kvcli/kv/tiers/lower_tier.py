"""Common methods of tiers below the top: slots come down to them, are read, and are evicted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import StoredKV
from kvcli.kv.slots import Slots, compact, empty_like, picked, run_of
from kvcli.kv.sparse.page_source import PageTier
from kvcli.kv.tiers.device_tables import LowerLayer


class StoredBelow(PageTier):
    """A tier below the top. Subclasses store slots (`take`), return them (`slots`), and evict them (`_keep`)."""

    gather_async = None
    UNCAPTURED: ClassVar[str]  # reason why captured passes cannot read the tier

    @property
    def _storing(self) -> Iterable[int]:
        """Layers that store slots."""
        raise NotImplementedError

    def _keep(self, layer: int, mask: Tensor) -> None:
        """Evict slots whose mask [K, S] is False."""
        raise NotImplementedError

    def device_layer(self, layer: int) -> LowerLayer | str:
        """Return the device tables of a layer, or the reason why there are none."""
        return self.UNCAPTURED

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store k, v [K, M, D] in all heads at positions from `start` on."""
        self.take(layer, Slots(k, v, run_of(start, k.shape[1], k.shape[0], k.device)))

    def newest(self, layer: int, n: int) -> Slots:
        """Return the n slots that each head stored last, which have the highest positions, by position."""
        s = self.slots(layer)
        found = picked(s, s.pos.argsort(dim=1, stable=True)[:, max(0, s.n_slots - n) :])
        return compact(found, found.pos >= 0)

    def run(self, layer: int) -> StoredKV | None:
        """Return None: slots are not in full precision in one place."""
        return None

    def evict_except(self, layer: int, mask: Tensor) -> Slots:
        """Evict slots whose mask [K, S] is False and return them."""
        before = self.slots(layer)
        mask = mask & (before.pos >= 0)
        if torch.equal(mask, before.pos >= 0):
            return empty_like(before)
        fell = compact(before, ~mask)
        del before
        self._keep(layer, mask)
        return fell

    def crop(self, n: int) -> None:
        """Remove every slot at position n or later."""
        for layer in self._storing:
            pos = self.positions(layer)
            if bool((pos >= n).any()):
                self._keep(layer, (pos >= 0) & (pos < n))
