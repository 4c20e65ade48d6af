"""Run tokens through the model one layer per pass, so that deferred tokens (LazyLLM) can join at the layer where they
stopped. Each row attends only to positions before its own."""

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

Stopped = dict[int, tuple[list[int], Tensor]]  # layer before which they stopped -> positions, hidden states [n, E]


class RevivalPass:
    """A revival pass of deferred tokens. The new KV is committed after the last layer. Layers with no active rows are
    skipped."""

    def __init__(self, lm: LM, kv: KVCache, ids: Sequence[int], aux_cache: AuxCache, pos: Sequence[int] = ()) -> None:
        """`pos`: rising positions in `ids` of tokens that start at the first layer; their KV is not committed."""
        self._lm, self._kv, self._ids, self._aux_cache = lm, kv, ids, aux_cache
        self._pos, self._hidden = list(pos), torch.empty(0)  # positions and hidden states of active rows
        self._guests = len(pos)  # number of tokens in `pos`, the newest rows
        self._came, self._stopped = set[int](), Stopped()
        self._made: list[tuple[Rows, ForwardResult]] = []

    def go(self, choose: Choose) -> Steps[None]:
        """Run one pass per layer."""
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
            vectors, both = self._aux_cache.hidden(layer, back), [*pos, *back]
            order = sorted(range(len(both)), key=both.__getitem__)
            pos, hidden = sorted(both), (torch.cat((hidden, vectors)) if self._pos else vectors)[order]
            self._came |= set(back)
        self._pos, self._hidden = pos, hidden

    def store(self) -> None:
        """Commit the new KV at the end. An error here leaves the cache inconsistent (`is_torn`), because only some
        layers have the KV of revived tokens."""
        self._aux_cache.is_torn = True
        for rows, made in self._made:
            commit(self._kv, rows, made, range(rows.n_rows - self._guests))
        self._aux_cache.remove(self._came)
        self._aux_cache.add(self._stopped)
        self._aux_cache.is_torn = False


class PositionMaskedCache:
    """A KV cache in which each row attends to the positions before its own, for rows older than stored slots."""

    def __init__(self, store: KVCache) -> None:
        self._store, self.dtype = store, store.dtype

    def fixed(self, rows: int, more: int = 0) -> DeviceCache:
        """Name the reason why passes over this cache are not captured."""
        return DeviceCache(why_not="revived tokens are older than stored ones")

    def attend(
        self, layer: int, q: Tensor, params: AttentionParams, pos: Sequence[int], own: NewRows | None = None
    ) -> list[PartialAttention]:
        """Return partial attention of q [H, N, D] at positions pos [N]: one part over the cache, the others over the
        new KV."""
        s = self._store.slots(layer)
        rows = torch.tensor(pos, dtype=s.pos.dtype, device=s.pos.device).view(1, -1, 1)
        at = s.pos.unsqueeze(1)  # [K, 1, S]
        shown = (at >= 0) & (at < rows)
        if params.window is not None:
            shown &= at > rows - params.window
        return [attend(q, s.k, s.v, params.scale, softcap=params.softcap, mask=shown), *attend_new_only(q, params, own)]

    def usage(self) -> list[Usage]:
        """No memory: the slots belong to the wrapped cache."""
        return []
