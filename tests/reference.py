"""References for cache views and page sources: both read all slots of a tier, at each call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import NewRows, StoredKV
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, Slots, Tier, Usage, attend_new_only, compact, picked, visible
from kvcli.kv.views.view import Pick, Selection


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
        s = compact(all_slots, self._pick(layer, q, all_slots, Selection()))
        if s.n_slots == 0:
            return attend_new_only(q, params, own)
        part = attend(q, s.k, s.v, params.scale, softcap=params.softcap, mask=visible(s.pos, pos, params.window))
        return [part, *attend_new_only(q, params, own)]


class AnyTierSource:
    """Reference page source of any tier, through its `slots`."""

    gather_async = None

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def positions(self, layer: int) -> Tensor:
        """Return the positions of the tier."""
        return self._tier.slots(layer).pos

    def run(self, layer: int) -> StoredKV | None:
        """Return None: the layout of the tier is unknown."""
        return None

    def n_stable(self, layer: int, n: Tensor) -> Tensor:
        """Return n: for tiers that never quantize, or quantize once."""
        return n

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Return a copy of slots index [K, M]."""
        s = self._tier.slots(layer)
        return picked(s, index.to(s.pos.device))

    def head(self, layer: int, head: int, n: int) -> Slots:
        """Return the first n slots of one head as views."""
        s = self._tier.slots(layer)
        return Slots(*(t[head : head + 1, :n] for t in (s.k, s.v, s.pos)))
