"""Tokens of any age on their way through the layers, some of which come back on it or stop.

One pass a layer, so that whoever comes back into one is in no pass before. A row sees what is older than itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.forward_request import ForwardRequest, ForwardResult, Steps
from kvcli.engine.prefill.prompt_pruner import ActiveRows
from kvcli.engine.rows import Rows
from kvcli.engine.sequence.commit import commit
from kvcli.kernels.attend import attend
from kvcli.kv.slots import AttentionParams, Usage, attend_new_only, spans
from kvcli.kv.tiers.device_tables import DeviceCache

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.aux_cache import AuxCache
    from kvcli.engine.prefill.prompt_pruner import Choose
    from kvcli.kernels.attend_invariant import NewRows
    from kvcli.kernels.merge_attention import PartialAttention
    from kvcli.kv.slots import KVCache

Stopped = dict[int, tuple[list[int], Tensor]]  # by the layer that they did not go into: positions, vectors [n, E]


class RevivalPass:
    """What these tokens make is stored when it is over. A layer goes by in which nobody is."""

    def __init__(self, lm: LM, kv: KVCache, ids: Sequence[int], behind: AuxCache, pos: Sequence[int] = ()) -> None:
        """`pos`: rising positions in `ids` of those that begin with the first layer; nothing of them is kept."""
        self._lm, self._kv, self._ids, self._behind = lm, kv, ids, behind
        self._pos, self._hidden = list(pos), torch.empty(0)  # of those on their way
        self._guests = len(pos)  # the newest
        self._came, self._stopped = set[int](), Stopped()
        self._made: list[tuple[Rows, ForwardResult]] = []

    def go(self, choose: Choose) -> Steps[None]:
        """A pass a layer."""
        for layers in spans(self._lm.shapes):
            if layers.start:
                self._enter(layers.start, choose)
            if not (n := len(self._pos)):
                continue
            rows = replace(Rows.chain([self._ids[p] for p in self._pos], 0), pos=list(self._pos))
            given = self._hidden if layers.start else None
            made = yield ForwardRequest(
                self._lm, rows, PositionMaskedCache(self._kv), record_queries=[n - 1], layers=layers, hidden=given
            )
            self._made.append((rows, made))
            if made.hidden is not None:
                self._hidden = made.hidden

    def _enter(self, layer: int, choose: Choose) -> None:
        pos, hidden = self._pos, self._hidden
        fresh, queries = None, None
        if self._made and pos:
            made = self._made[-1][1]
            fresh, queries = made.fresh[layer - 1], made.queries[-1]
        on, back = choose(layer, ActiveRows(range(len(pos)), fresh, queries), pos)
        stay = set(on)
        if out := [i for i, p in enumerate(pos) if p not in stay]:
            self._stopped[layer] = [pos[i] for i in out], hidden[out]
            at = [i for i, p in enumerate(pos) if p in stay]
            pos, hidden = [pos[i] for i in at], hidden[at]
        if back:
            vectors, both = self._behind.hidden(layer, back), [*pos, *back]
            order = sorted(range(len(both)), key=both.__getitem__)
            pos, hidden = sorted(both), (torch.cat((hidden, vectors)) if self._pos else vectors)[order]
            self._came |= set(back)
        self._pos, self._hidden = pos, hidden

    def store(self) -> None:
        """It is over. What breaks here leaves the store torn: what came back lies among what was there."""
        self._behind.is_torn = True
        for rows, made in self._made:
            commit(self._kv, rows, made, range(rows.n_rows - self._guests))
        self._behind.remove(self._came)
        self._behind.add(self._stopped)
        self._behind.is_torn = False


class PositionMaskedCache:
    """A store as tokens of any age see it: each what is older than itself."""

    def __init__(self, store: KVCache) -> None:
        self._store, self.dtype = store, store.dtype

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """Why it needs the host."""
        return DeviceCache(why_not="tokens that come back are older than what is stored")

    def attend(
        self, layer: int, q: Tensor, sight: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """q [H, N, D] of rows at positions pos [N] -> a part over what is stored, and those over their pass."""
        s = self._store.slots(layer)
        rows = torch.tensor(pos, dtype=s.pos.dtype, device=s.pos.device).view(1, -1, 1)
        at = s.pos.unsqueeze(1)  # [K, 1, S]
        shown = (at >= 0) & (at < rows)
        if sight.window is not None:
            shown &= at > rows - sight.window
        return [attend(q, s.k, s.v, sight.scale, softcap=sight.softcap, mask=shown), *attend_new_only(q, sight, own)]

    def usage(self) -> list[Usage]:
        """It holds nothing."""
        return []
