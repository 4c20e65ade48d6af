"""Readers of a KV cache whose passes are not captured, such as those of rows between stored tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import WIDEST, NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, KVCache, LayerShape, Usage, attend_new_only
from kvcli.kv.tiers.device_tables import DeviceCache


class UncapturedReader:
    """Base of readers of another object's slots, whose passes are not captured."""

    why_not: str  # reason why its passes are not captured

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return the reason why passes over it are not captured."""
        return DeviceCache(why_not=self.why_not)

    def usage(self) -> list[Usage]:
        """No memory of its own."""
        return []


class PositionMaskedCache(UncapturedReader):
    """A KV cache for rows that may be older than stored slots: each row attends only to positions before its own."""

    why_not = "revived tokens are older than stored ones"

    def __init__(self, store: KVCache) -> None:
        self._store, self.dtype = store, store.dtype

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N]: one part over the cache, the others over the
        new KV."""
        s = self._store.slots(layer)
        rows = torch.tensor(pos, dtype=s.pos.dtype, device=s.pos.device).view(1, -1, 1)
        at = s.pos.unsqueeze(1)  # [K, 1, S]
        mask = (at >= 0) & (at < rows)
        if params.window is not None:
            mask &= at > rows - params.window
        return [attend(q, s.k, s.v, params.scale, softcap=params.softcap, mask=mask), *attend_new_only(q, params, own)]


class KVOverlay(UncapturedReader):
    """A KV cache with extra KV. Rows attend to all slots of the cache, and to the extra tokens older than themselves as
    if their pass had computed them."""

    why_not = "reused KV is read outside the KV cache"

    def __init__(
        self,
        store: KVCache,
        shapes: Sequence[LayerShape],
        extra: Mapping[int, tuple[Tensor, Tensor]],
        pos: Sequence[int],
    ) -> None:
        """`extra`: by layer that stores KV, k [K, M, D] and v [K, M, E] of tokens at positions pos [M]."""
        self._store, self.dtype = store, store.dtype
        self._shapes, self._extra, self._pos = shapes, extra, list(pos)

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N] over the cache, and over the extra KV with the
        new KV."""
        shares = self._shapes[layer].shared_from
        k, v = self._extra[layer if shares is None else shares]
        if own is None:
            at, rows = torch.tensor(self._pos).view(1, -1), torch.tensor(pos).view(-1, 1)
            mask = (at <= rows) & (at > rows - (params.window or WIDEST))
            over_extra = attend(q, k, v, params.scale, softcap=params.softcap, mask=mask.to(q.device))
            return [*self._store.attend(layer, q, params, pos), over_extra]
        every = [*self._pos, *own.pos]
        at, rows = torch.tensor(every).view(1, -1), torch.tensor(own.pos).view(-1, 1)
        tree_mask = at <= rows  # [N, M + N]
        mask = tree_mask if params.window is None else tree_mask & (at > rows - params.window)
        k, v = torch.cat([k, own.k], 1), torch.cat([v, own.v], 1)
        both = replace(own, k=k, v=v, pos=every, tree_mask=tree_mask, mask=mask.to(q.device))
        # separate: combined with the cache, rows with gaps between them would each be computed alone, which is slow
        return [*self._store.attend(layer, q, params, pos), *attend_new_only(q, params, both)]
