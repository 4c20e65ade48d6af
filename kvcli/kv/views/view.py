"""Compact cache view: a short dense copy of the slots of a KV cache that a policy keeps, with the same `attend` method.

Lookahead rows and drafts read through a view; the cache itself loses no slots. FAFO's code swaps slots so that its view
is always the front of the one buffer. A copy costs a few megabytes more, does not change the cache, and is faster on a
CPU, which copies a slice of a buffer at every matrix product. The policy selects again every `every` tokens; slots
committed in between are added. A view affects the cost of drafts, never the generated text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, KVCache, LayerShape, Slots, Usage, attend_new_only, compact
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.tiers.device_tables import DeviceCache


@dataclass(slots=True)
class Selection:
    """The last selection of a layer's slots. It starts anew when stored slots were evicted or moved."""

    changes: int = -1  # `changes` of the cache
    n: int = 0  # slots of the longest head, all of which the selection rule has seen
    summary: tuple[Tensor, ...] = ()  # values that the rule keeps of these slots
    seen: int = 0  # slots of the longest head that are in the copy or were not selected
    end: int = 0  # position after the newest slot


Pick = Callable[[int, Tensor, Slots, Selection], Tensor]  # layer, q [H, N, D], slots, the last one -> keep mask [K, S]


class CompactView:
    """A copy of the slots of `store` that `pick` keeps, selected again after at most `every` tokens."""

    STEP = 64  # slots by which a layer of the copy grows

    def __init__(
        self, store: KVCache, pick: Pick, every: int, shapes: Sequence[LayerShape], by_queries: bool = True
    ) -> None:
        """`by_queries`: `pick` reads the queries."""
        self._store, self._pick, self._every, self._by_queries, self._shapes = store, pick, every, by_queries, shapes
        device = store.slots(0).k.device
        self._copy = Dense([replace(shape, shared_from=None) for shape in shapes], store.dtype, device, step=self.STEP)
        self._last = [Selection() for _ in shapes]  # by layer

    def rebind(self, store: KVCache) -> CompactView:
        """Return a view with the same selection rule over another KV cache, with no slots copied yet."""
        return CompactView(store, self._pick, self._every, self._shapes, self._by_queries)

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return the device tables of the copy, with capacity for `rows` more; slots are selected again if due."""
        if self._by_queries and any(map(self._is_due, range(len(self._shapes)))):
            return DeviceCache(why_not="the cache view is selected by the queries of the pass (spec.view)")
        for layer in range(len(self._shapes)):
            self._refresh(layer)
        tables = self._copy.device_tables(rows, self._every)
        return replace(tables, grew=partial(self._grew, tables.grew))

    def _is_due(self, layer: int) -> bool:
        is_stale = self._store.changes != self._last[layer].changes
        return is_stale or self._store.n_slots(layer) - self._last[layer].n >= self._every

    def _refresh(self, layer: int, q: Tensor | None = None) -> None:
        n, last = self._store.n_slots(layer), self._last[layer]
        if n and self._is_due(layer):
            if last.changes != self._store.changes:
                last = self._last[layer] = Selection()
            slots = self._store.slots(layer)
            mask = self._pick(layer, slots.k[:, :0] if q is None else q, slots, last)
            self._copy.put(layer, compact(slots, mask))
            last.changes, last.n, last.seen, last.end = self._store.changes, n, n, int(slots.pos.max()) + 1
        elif n > last.seen:  # slots committed since the selection are the same tokens for every head
            fresh = self._store.newest(layer, n - last.seen)
            self._copy.append(layer, fresh.k, fresh.v, last.end)
            last.seen, last.end = n, last.end + fresh.n_slots

    def _grew(self, grew: Callable[[int, int], None], n: int, start: int) -> None:
        grew(n, start)
        for last in self._last:
            last.seen, last.end = last.seen + n, start + n

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N] over kept slots and new KV."""
        if not self._store.n_slots(layer):
            return attend_new_only(q, params, own)
        self._refresh(layer, q)
        return self._copy.attend(layer, q, params, pos, own)

    def usage(self) -> list[Usage]:
        """Return the memory use of the copy and of summaries, as tier "view"."""
        of = [sum(t.nbytes for t in last.summary) for last in self._last]
        return [replace(use, tier="view", nbytes=use.nbytes + of[use.layer]) for use in self._copy.usage()]
