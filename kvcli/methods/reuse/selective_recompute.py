"""Selective recompute of the tokens of a span whose keys and values, or hidden states, differ most from the source's.

One forward pass runs per layer. Its rows attend by position to the KV cache, to the reused KV of the other tokens and
to each other. The new KV replaces the reused KV, and the whole span is committed after the last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.forward_request import ForwardRequest, ForwardResult, Passes, Rows
from kvcli.engine.sequence.commit import commit
from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import WIDEST, NewRows
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kv.slots import AttentionParams, LayerShape, attend_new_only, layer_groups
from kvcli.kv.tiers.dense import Dense
from kvcli.kv.views.borrowing import BorrowingReader

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.kv.slots import CacheReader, KVCache
    from kvcli.prefix_cache.matching_spans import Held, MatchingSpan, SpanSource

PART = 1024  # tokens of a source sequence per pass through its first layer


class SelectiveRecompute:
    """Selective recompute for the spans of one prompt."""

    def __init__(self, lm: LM, shares: Callable[[int], list[float]], by_hidden: bool, chooses: bool) -> None:
        """`shares(n)`: the share of a span that is recomputed in each of n layers above the first. `by_hidden`: tokens
        are chosen by their hidden states. `chooses`: not all tokens are recomputed."""
        self._lm, self._spans = lm, layer_groups(lm.shapes)
        self._shares = shares(len(self._spans) - 1)
        self._by_hidden, self._chooses = by_hidden, chooses
        self._before: list[First] = []

    def __call__(self, rows: Rows, held: Held, kv: KVCache, run: MatchingSpan, source: SpanSource) -> Passes[Held]:
        """Recompute a span and return the KV to commit. `rows`: its tokens, after those in `kv`; `held`: reused KV."""
        held = {layer: (k.clone(), v.clone()) for layer, (k, v) in held.items()}
        live = torch.arange(run.n, device=self._lm.device)
        made = yield from self._through(self._spans[0], rows, None, held, kv, live)
        _put(made, held, live)
        hidden, differs = made.hidden, torch.zeros(run.n, device=live.device)
        if hidden is not None and self._chooses:
            if self._by_hidden:
                was = yield from self._first(source, kv.dtype).gave(run.old, run.n)
                differs = _off(hidden, was, (1,))
            else:
                layers = self._spans[1]
                made = yield ForwardRequest(
                    self._lm, rows, kv, is_prompt=True, layers=layers, hidden=hidden, only_kv=True
                )
                differs = _differ(made, held, live)
        for layers, share in zip(self._spans[1:], self._shares, strict=True):
            assert hidden is not None, "there are layers above"
            stay = differs.nan_to_num(torch.inf).topk(ceil(run.n * share)).indices.sort().values
            live = live[stay]
            made = yield from self._through(layers, rows, hidden[stay], held, kv, live)
            is_judged = self._chooses and not self._by_hidden and made.hidden is not None
            differs = _differ(made, held, live) if is_judged else torch.zeros(len(live), device=live.device)
            _put(made, held, live)
            hidden = made.hidden
        return held

    def _through(
        self, layers: range, rows: Rows, hidden: Tensor | None, held: Held, kv: KVCache, live: Tensor
    ) -> Passes[ForwardResult]:
        """Run the rows in `live` through `layers`."""
        on: Rows = rows
        past: CacheReader = kv
        if len(live) < rows.n_rows:
            on, past = rows.only(live.tolist()), self._beside(kv, held, layers, rows, live)
        return (yield ForwardRequest(self._lm, on, past, is_prompt=True, layers=layers, hidden=hidden))

    def _beside(self, kv: KVCache, held: Held, layers: range, rows: Rows, live: Tensor) -> KVOverlay:
        """Return the KV cache overlaid with the reused KV of the span's tokens that are not in the pass."""
        rest = torch.ones(rows.n_rows, dtype=torch.bool, device=live.device).index_fill(0, live, False).nonzero()[:, 0]
        left = {layer: (k[:, rest], v[:, rest]) for layer, (k, v) in held.items() if layer in layers}
        return KVOverlay(kv, self._lm.shapes, left, [rows.pos[i] for i in rest.tolist()])

    def _first(self, source: SpanSource, dtype: torch.dtype) -> First:
        for one in self._before:
            if one.ids is source.ids:
                return one
        self._before.append(First(self._lm, source.ids, dtype, self._spans[0]))
        return self._before[-1]


class First:
    """The source sequence of a span, run through its first layer only."""

    def __init__(self, lm: LM, ids: Sequence[int], dtype: torch.dtype, layers: range) -> None:
        """`layers`: the first layer and the layers that share its KV."""
        self.ids, self._lm, self._layers, self._n = ids, lm, layers, 0
        self._kv = Dense(lm.shapes, dtype, lm.device)

    def gave(self, first: int, n: int) -> Passes[Tensor]:
        """Return the hidden states [n, E] after these layers, of n tokens from position `first` on."""
        self._n, found = min(self._n, first), list[Tensor]()
        self._kv.crop(self._n)
        while self._n < first + n:
            end = min(self._n + PART, first if self._n < first else first + n)
            rows = Rows.chain(self.ids[self._n : end], self._n)
            made = yield ForwardRequest(self._lm, rows, self._kv, is_prompt=True, layers=self._layers)
            assert made.hidden is not None, "there are layers above"
            if self._n >= first:
                found.append(made.hidden)
            commit(self._kv, rows, made, range(rows.n_rows))
            self._n = end
        return torch.cat(found)


def _differ(made: ForwardResult, held: Held, live: Tensor) -> Tensor:
    """Return how much the new keys and values of each token [n] differ from the reused ones, in the pass's layers."""
    found = torch.zeros(len(live), device=live.device)
    for layer, fresh in made.fresh.items():
        k, v = held[layer]
        found += _off(fresh.k, k[:, live], (0, 2)) + _off(fresh.v, v[:, live], (0, 2))
    return found


def _put(made: ForwardResult, held: Held, live: Tensor) -> None:
    """Replace the reused KV of these tokens by the new KV, in place."""
    for layer, fresh in made.fresh.items():
        for t, new in zip(held[layer], (fresh.k, fresh.v), strict=True):
            t[:, live] = new


def _off(now: Tensor, was: Tensor, over: tuple[int, ...]) -> Tensor:
    """Return the mean squared difference of each token, relative to the mean square of all."""
    wide = now.float()
    return (wide - was.float()).square().mean(over) / wide.square().mean().clamp_min(1e-30)


class KVOverlay(BorrowingReader):
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
