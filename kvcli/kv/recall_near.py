"""What the last pass read of a far tier, kept where rows are computed: the next pass fetches only the difference.

Neighbouring tokens want mostly the same pages, and the rows of a draft ask for those of the tokens to come.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kv.recall_source import Source
from kvcli.kv.slots import Slots, picked

NONE = torch.iinfo(torch.int64).max  # an index behind all others


class Near:
    """Slots of `far` by their index, as long as they do not change: `forget` says when they may have."""

    def __init__(self, far: Source) -> None:
        self._far = far
        self._held: dict[int, tuple[Tensor, Slots]] = {}  # index [K, M] rising, NONE last; and the slots
        self.fetched = 0  # slots of all heads, since the beginning
        self.asked = 0

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Slots index [K, M] of each head, -1 = none."""
        held = self._held.get(layer)
        got = self._far.gather(layer, index) if held is None else self._renewed(layer, index, *held)
        order = index.masked_fill(index < 0, NONE).sort(1)
        self._held[layer] = order.values, picked(got, order.indices)
        self.asked += int((index >= 0).sum())
        self.fetched += int((index >= 0).sum()) if held is None else 0
        return got

    def forget(self, layer: int) -> None:
        """Slots of this layer may have moved or changed."""
        self._held.pop(layer, None)

    def nbytes(self, layer: int) -> int:
        """What is kept of this layer."""
        index, s = self._held.get(layer, (None, None))
        return 0 if s is None or index is None else sum(t.nbytes for t in (index, s.k, s.v, s.pos))

    def _renewed(self, layer: int, index: Tensor, held: Tensor, slots: Slots) -> Slots:
        at = torch.searchsorted(held, index.contiguous()).clamp(max=held.shape[1] - 1)
        is_new = (held.gather(1, at) != index) & (index >= 0)
        out = picked(slots, at.masked_fill(index < 0, -1))
        heads, to = is_new.nonzero(as_tuple=True)
        if heads.shape[0]:
            count = is_new.sum(1)
            rank = torch.arange(heads.shape[0], device=index.device) - (count.cumsum(0) - count)[heads]
            missing = index.new_full((index.shape[0], int(count.max())), -1)
            missing[heads, rank] = index[heads, to]
            new = self._far.gather(layer, missing)
            for t, fresh in ((out.k, new.k), (out.v, new.v), (out.pos, new.pos)):
                t[heads, to] = fresh[heads, rank].to(t)
            self.fetched += heads.shape[0]
        return out
