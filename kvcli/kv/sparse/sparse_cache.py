"""Recall over a whole store, for a past that is one tier; on a ladder of several, the lower ones recall instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from kvcli.kv.slots import KVCache, Masks
from kvcli.kv.sparse.index import PageIndex
from kvcli.kv.sparse.pages import PageBudget
from kvcli.kv.sparse.sparse_tier import SparseTier
from kvcli.kv.tiers.device_tables import DeviceCache


class SparseCache(SparseTier):
    """A store whose rows read a part of it."""

    def __init__(
        self, store: KVCache, index: PageIndex, budget: PageBudget, layers: Collection[int], **more: Any
    ) -> None:
        """As `SparseTier`."""
        super().__init__(store, index, budget, layers, **more)
        self._store = store

    @property
    def dtype(self) -> torch.dtype:
        """The store's."""
        return self._store.dtype

    @property
    def changes(self) -> int:
        """The store's."""
        return self._store.changes

    @property
    def forgets(self) -> bool:
        """The store's."""
        return self._store.forgets

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """Why it needs the host."""
        return DeviceCache(why_not="rows choose which pages they read (sparse.method)")

    def reserve(self, n: int, layers: Iterable[int] | None = None) -> None:
        """Room for n slots a head."""
        self._store.reserve(n, layers)

    def reaches(self, n: int) -> bool:
        """As the store."""
        return self._store.reaches(n)

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        """A boundary: what is stored now is what rows choose from."""
        has_lost = self._store.compress(masks, end, layers)
        if has_lost:
            for pages in self._pages.values():
                pages.clear()
        self._learn(self._pages if layers is None else layers)
        return has_lost
