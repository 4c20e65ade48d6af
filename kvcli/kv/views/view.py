"""Reference cache view: the subset of a KV cache that a policy keeps, with the same `attend` method.

Lookahead rows and drafts read through a view; the cache itself loses no slots. This view runs the policy and gathers
slots at each read. A fast view (compact_view.py) keeps a dense copy and selects again at intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, Slots, Tier, Usage, attend_new_only, compact, visible

Pick = Callable[[int, Tensor, Slots], Tensor]  # layer, q [H, N, D], slots -> keep mask [K, S]


class GatheredView:
    """A view of the slots of `store` that `pick` keeps, selected at each read."""

    def __init__(self, store: Tier, pick: Pick) -> None:
        self._store, self._pick = store, pick

    def rebind(self, store: Tier) -> GatheredView:
        """Return a view with the same selection rule over another KV cache."""
        return GatheredView(store, self._pick)

    def usage(self) -> list[Usage]:
        """Return an empty list: the view stores no slots."""
        return []

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N] over kept slots and new KV."""
        all_slots = self._store.slots(layer)
        s = compact(all_slots, self._pick(layer, q, all_slots))
        if s.n_slots == 0:
            return attend_new_only(q, params, own)
        part = attend(q, s.k, s.v, params.scale, softcap=params.softcap, mask=visible(s.pos, pos, params.window))
        return [part, *attend_new_only(q, params, own)]
