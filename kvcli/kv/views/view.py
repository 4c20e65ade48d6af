"""A view: the subset of a store that a policy keeps, answering the same `attend` call.

Scouts and drafts read through it; the store itself loses nothing. This is the reference: it asks the policy at each
read and gathers. A view that must be fast keeps its slots as a dense prefix and refreshes at boundaries.
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
    """What `pick` keeps of `store`, at each read."""

    def __init__(self, store: Tier, pick: Pick) -> None:
        self._store, self._pick = store, pick

    def rebind(self, store: Tier) -> GatheredView:
        """The same choice from another store."""
        return GatheredView(store, self._pick)

    def usage(self) -> list[Usage]:
        """Nothing of its own."""
        return []

    def attend(
        self, layer: int, q: Tensor, sight: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """q [H, N, D] of rows at positions pos [N] -> what is kept, if anything is, and their pass."""
        all_slots = self._store.slots(layer)
        s = compact(all_slots, self._pick(layer, q, all_slots))
        if s.n_slots == 0:
            return attend_new_only(q, sight, own)
        part = attend(q, s.k, s.v, sight.scale, softcap=sight.softcap, mask=visible(s.pos, pos, sight.window))
        return [part, *attend_new_only(q, sight, own)]
