"""A KV cache combined with KV of tokens that are not recomputed, which lie between the tokens of a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import WIDEST, NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, LayerShape, Usage, attend_new_only
from kvcli.kv.tiers.device_tables import DeviceCache

if TYPE_CHECKING:
    from kvcli.kv.slots import KVCache


class KVOverlay:
    """A KV cache with extra KV. Rows attend to all slots of the cache, and to the extra tokens older than themselves as
    if their pass had computed them."""

    def __init__(
        self,
        store: KVCache,
        shapes: Sequence[LayerShape],
        held: Mapping[int, tuple[Tensor, Tensor]],
        pos: Sequence[int],
    ) -> None:
        """`held`: by layer that stores, k [K, M, D] and v [K, M, E] of tokens at positions pos [M]."""
        self._store, self._shapes, self._held, self._pos = store, shapes, held, list(pos)
        self.dtype = store.dtype

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """Name the reason why passes over this cache are not captured."""
        return DeviceCache(why_not="reused KV is read outside the KV cache")

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N] over the cache, and over the extra KV with the
        new KV."""
        shares = self._shapes[layer].shared_from
        k, v = self._held[layer if shares is None else shares]
        if own is None:
            at, rows = torch.tensor(self._pos).view(1, -1), torch.tensor(pos).view(-1, 1)
            line = (at <= rows) & (at > rows - (params.window or WIDEST))
            held = attend(q, k, v, params.scale, softcap=params.softcap, mask=line.to(q.device))
            return [*self._store.attend(layer, q, params, pos), held]
        every = [*self._pos, *own.pos]
        at, rows = torch.tensor(every).view(1, -1), torch.tensor(own.pos).view(-1, 1)
        line = at <= rows  # [N, M + N]
        sees = line if params.window is None else line & (at > rows - params.window)
        k, v = torch.cat([k, own.k], 1), torch.cat([v, own.v], 1)
        both = replace(own, k=k, v=v, pos=every, line=line, sees=sees.to(q.device))
        # separate: combined with the cache, rows with gaps between them would each be computed alone, which is slow
        return [*self._store.attend(layer, q, params, pos), *attend_new_only(q, params, both)]

    def usage(self) -> list[Usage]:
        """No lasting memory."""
        return []
