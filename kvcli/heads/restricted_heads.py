"""Cache view with restricted heads: they attend only to the first and the newest tokens.

The view simulates eviction for these heads after prefill, without evicting any slot. So one KV cache serves many
passes, each with other restricted heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, KVCache, Slots, attend_new_only, compact, window_start
from kvcli.kv.tiers.device_tables import DeviceCache


@dataclass(frozen=True, slots=True)
class HeadWindow:
    """Slots that a restricted head can attend to."""

    sinks: int = 4  # first tokens
    recent: int = 64  # newest stored tokens

    def covers(self, pos: Tensor, rows: Sequence[int]) -> Tensor:
        """Return which slots at positions [K, S] rows at positions [N] can attend to: bool [K, N, S]."""
        near = pos.unsqueeze(1) > window_start(rows, self.recent, pos.device)
        return (near | (pos < self.sinks).unsqueeze(1)) & (pos >= 0).unsqueeze(1)


class RestrictedHeads:
    """Cache view of `store` in which heads with `blind` [L, K] set attend only to slots in `reach`; never committed."""

    batch_variant_reason = "its parts are merged by torch"

    def __init__(self, store: KVCache, blind: Tensor, reach: HeadWindow) -> None:
        self.dtype = store.dtype
        self._store, self._blind, self._reach = store, blind, reach

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return why captured passes cannot read this view."""
        return DeviceCache(why_not="heads are restricted")

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return the partial attention of q [H, N, D]: unrestricted heads, restricted heads, and the pass's new KV."""
        blind = self._blind[layer]  # [K]
        if not bool(blind.any()):
            return self._store.attend(layer, q, params, pos, own)
        parts, rest = self._store.attend(layer, q, params, pos), attend_new_only(q, params, own)
        if not parts:
            return rest
        rows = blind.repeat_interleave(q.shape[0] // blind.shape[0])  # [H]
        left = [_without(part, rows) for part in parts]
        s = self._store.slots(layer)
        few = self._near(Slots(s.k[blind], s.v[blind], s.pos[blind]), pos)
        if not few.n_slots:
            return [*left, *rest]
        shown = self._reach.covers(few.pos, pos)
        if params.window is not None:
            shown &= few.pos.unsqueeze(1) > window_start(pos, params.window, few.pos.device)
        seen = attend(q[rows], few.k, few.v, params.scale, softcap=params.softcap, mask=shown)
        out = torch.zeros_like(left[0].out)
        lse = torch.full_like(left[0].lse, -torch.inf)
        out[rows], lse[rows] = seen.out.to(out.dtype), seen.lse.to(lse.dtype)
        return [*left, PartialAttention(out, lse), *rest]

    def _near(self, s: Slots, pos: Sequence[int]) -> Slots:
        """Return the slots that any row can attend to."""
        first = min(pos) - self._reach.recent
        return compact(s, (s.pos < self._reach.sinks) | (s.pos > first))


def _without(part: PartialAttention, rows: Tensor) -> PartialAttention:
    """Return the partial attention with these query heads [H] emptied."""
    return PartialAttention(
        part.out.masked_fill(rows.view(-1, 1, 1), 0.0), part.lse.masked_fill(rows.view(-1, 1), -torch.inf)
    )
