"""Sparse attention over a whole KV cache of one tier; in a tiered cache, each lower tier is a `SparseTier` instead."""

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
    """A KV cache whose rows read selected pages."""

    def __init__(
        self, store: KVCache, index: PageIndex, budget: PageBudget, layers: Collection[int], **more: Any
    ) -> None:
        """Take the arguments of `SparseTier`, with a KV cache as its tier."""
        super().__init__(store, index, budget, layers, **more)
        self._store = store

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the KV cache."""
        return self._store.dtype

    @property
    def changes(self) -> int:
        """Change counter of the KV cache."""
        return self._store.changes

    @property
    def forgets(self) -> bool:
        """True if the KV cache evicts slots."""
        return self._store.forgets

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """Return no tables, because rows select pages on the host."""
        return DeviceCache(why_not="tokens select the pages they read (sparse.method)")

    def reserve(self, n: int, layers: Iterable[int] | None = None) -> None:
        """Allocate capacity for n slots per head."""
        self._store.reserve(n, layers)

    def reaches(self, n: int) -> bool:
        """True if the KV cache has all slots in the sliding windows of a row at position n."""
        return self._store.reaches(n)

    def compress(self, masks: Masks = (), end: int = 0, layers: Iterable[int] | None = None) -> bool:
        """Run a compression point: rows select from the slots stored now until the next one."""
        has_lost = self._store.compress(masks, end, layers)
        if has_lost:
            for pages in self._pages.values():
                pages.clear()
        self._learn(self._pages if layers is None else layers)
        return has_lost
