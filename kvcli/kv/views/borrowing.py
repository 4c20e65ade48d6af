"""Readers of another object's slots, such as those of rows between stored tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, KVCache, Usage, attend_new_only
from kvcli.kv.tiers.device_tables import DeviceCache

ROWS = 64  # rows whose masks over all slots are made at once


class BorrowingReader:
    """Base of readers of another object's slots."""

    why_not = ""  # reason why its passes are not captured, if they are not
    batch_variant_reason = "it reads another object's slots"

    def device_tables(self, rows: int, more: int = 0) -> DeviceCache:
        """Return the reason why passes over it are not captured."""
        return DeviceCache(why_not=self.why_not)

    def usage(self) -> list[Usage]:
        """No memory of its own."""
        return []


class PositionMaskedCache(BorrowingReader):
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
        outs, masses = [], []
        for first in range(0, len(pos), ROWS):
            rows = torch.tensor(pos[first : first + ROWS], dtype=s.pos.dtype, device=s.pos.device).view(1, -1, 1)
            at = s.pos.unsqueeze(1)  # [K, 1, S]
            mask = (at >= 0) & (at < rows)
            if params.window is not None:
                mask &= at > rows - params.window
            part = attend(q[:, first : first + ROWS], s.k, s.v, params.scale, softcap=params.softcap, mask=mask)
            outs.append(part.out)
            masses.append(part.lse)
        return [PartialAttention(torch.cat(outs, 1), torch.cat(masses, 1)), *attend_new_only(q, params, own)]
