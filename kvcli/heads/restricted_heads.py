"""A store as heads with blinkers see it: the first tokens and the newest ones, nothing between.

What eviction would do to these heads once the text is read, without evicting anything: the store stays whole and serves
one pass after another, each with other heads in blinkers.
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
    """How far a head in blinkers still sees."""

    sinks: int = 4  # first tokens
    recent: int = 64  # newest tokens, of those stored

    def covers(self, pos: Tensor, rows: Sequence[int]) -> Tensor:
        """Which slots at positions [K, S] rows at positions [N] see: [K, N, S] bool."""
        near = pos.unsqueeze(1) > window_start(rows, self.recent, pos.device)
        return (near | (pos < self.sinks).unsqueeze(1)) & (pos >= 0).unsqueeze(1)


class RestrictedHeads:
    """Reads `store`; heads whose `blind` [L, K] is True see only what `reach` covers. For passes never committed."""

    def __init__(self, store: KVCache, blind: Tensor, reach: HeadWindow) -> None:
        self.dtype = store.dtype
        self._store, self._blind, self._reach = store, blind, reach

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """Why it needs the host."""
        return DeviceCache(why_not="heads are blinkered")

    def attend(
        self, layer: int, q: Tensor, sight: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """q [H, N, D] of rows at positions pos [N] -> the store's parts without these heads, theirs, and their pass."""
        blind = self._blind[layer]  # [K]
        if not bool(blind.any()):
            return self._store.attend(layer, q, sight, pos, own)
        parts, rest = self._store.attend(layer, q, sight, pos), attend_new_only(q, sight, own)
        if not parts:
            return rest
        rows = blind.repeat_interleave(q.shape[0] // blind.shape[0])  # [H]
        left = [_without(part, rows) for part in parts]
        s = self._store.slots(layer)
        few = self._near(Slots(s.k[blind], s.v[blind], s.pos[blind]), pos)
        if not few.n_slots:
            return [*left, *rest]
        shown = self._reach.covers(few.pos, pos)
        if sight.window is not None:
            shown &= few.pos.unsqueeze(1) > window_start(pos, sight.window, few.pos.device)
        seen = attend(q[rows], few.k, few.v, sight.scale, softcap=sight.softcap, mask=shown)
        out = torch.zeros_like(left[0].out)
        lse = torch.full_like(left[0].lse, -torch.inf)
        out[rows], lse[rows] = seen.out.to(out.dtype), seen.lse.to(lse.dtype)
        return [*left, PartialAttention(out, lse), *rest]

    def _near(self, s: Slots, pos: Sequence[int]) -> Slots:
        """The slots that any of the rows sees."""
        first = min(pos) - self._reach.recent
        return compact(s, (s.pos < self._reach.sinks) | (s.pos > first))


def _without(part: PartialAttention, rows: Tensor) -> PartialAttention:
    """The part as if these query heads [H] had seen nothing."""
    return PartialAttention(
        part.out.masked_fill(rows.view(-1, 1, 1), 0.0), part.lse.masked_fill(rows.view(-1, 1), -torch.inf)
    )
