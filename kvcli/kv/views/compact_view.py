"""A view that is fast to read: a short dense copy of what a policy keeps of the store.

FAFO's code swaps slots so that its view is always the front of the one buffer. A copy costs a few megabytes more,
leaves the store alone, and reads faster on a CPU, where a slice of a slab is copied at every product anyhow. It is
chosen anew every `every` tokens; what is committed in between joins it. A view decides what guesses cost and never what
is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, KVCache, LayerShape, Slots, Usage, attend_new_only, compact
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.views.view import Pick


class CompactView:
    """What `pick` keeps of `store`, copied; at most `every` tokens out of date in what it left out."""

    STEP = 64  # slots by which a layer of the copy grows

    def __init__(self, store: KVCache, pick: Pick, every: int, shapes: Sequence[LayerShape]) -> None:
        self._store, self._pick, self._every = store, pick, every
        self._shapes, n_layers = shapes, len(shapes)
        device = store.slots(0).k.device
        self._copy = Dense([replace(shape, shared_from=None) for shape in shapes], store.dtype, device, step=self.STEP)
        self._changes = [-1] * n_layers  # of the store, when the layer was copied
        self._seen = [0] * n_layers  # slots of the longest head in the store, copied or left out
        self._chosen = [0] * n_layers  # of them, when the layer was chosen
        self._end = [0] * n_layers  # position behind the newest

    def rebind(self, store: KVCache) -> CompactView:
        """The same choice from another store, with nothing copied yet."""
        return CompactView(store, self._pick, self._every, self._shapes)

    def attend(
        self, layer: int, q: Tensor, sight: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """q [H, N, D] of rows at positions pos [N] -> what is kept, if anything is, and their pass."""
        n = self._store.n_slots(layer)
        if not n:
            return attend_new_only(q, sight, own)
        is_stale = self._store.changes != self._changes[layer]
        if is_stale or n - self._chosen[layer] >= self._every:
            self._choose(layer, q, self._store.slots(layer))
        elif n > self._seen[layer]:
            self._join(layer, self._store.newest(layer, n - self._seen[layer]))
        return self._copy.attend(layer, q, sight, pos, own)

    def usage(self) -> list[Usage]:
        """What the copy takes, as a tier of its own."""
        return [replace(use, tier="view") for use in self._copy.usage()]

    def _choose(self, layer: int, q: Tensor, slots: Slots) -> None:
        kept = compact(slots, self._pick(layer, q, slots))
        self._copy.put(layer, kept)
        self._changes[layer] = self._store.changes
        self._seen[layer] = self._chosen[layer] = slots.n_slots
        self._end[layer] = int(slots.pos.max()) + 1

    def _join(self, layer: int, fresh: Slots) -> None:
        """Append what was committed since: every head stores the same, at the end of its own slots."""
        self._copy.append(layer, fresh.k, fresh.v, self._end[layer])
        self._seen[layer] += fresh.n_slots
        self._end[layer] += fresh.n_slots
