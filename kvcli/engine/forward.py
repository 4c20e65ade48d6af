"""Forward pass: rows through the model, attending to the KV cache, a cache view and each other.

Two things connect it to transformers: the function `attention`, registered once, which finds the running pass on a
stack, and a `CacheShim` in place of the layers' cache (cache_shim.py). Layers, rotary embeddings, norms and the output
layer are transformers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcli.engine.forward_request import NewKV, Rows
from kvcli.engine.hf.cache_shim import CacheShim, RunningPass, call, current, latent_notes
from kvcli.engine.hf.layer_gates import StopForward
from kvcli.engine.hf.recurrent_layers import SequenceSlice, StateCacheShim, refused
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention, merge_attention
from kvcli.kv.recurrent_state import StateUpdate
from kvcli.kv.slots import AttentionParams

if TYPE_CHECKING:
    from kvcli.engine.forward_request import ForwardRequest
    from kvcli.engine.hf.lm import LM

PLACE = "kvcli_place"  # attribute set on an attention module: the index of its layer among those with attention


class SequencePass(RunningPass):
    """A forward pass of the rows of one sequence, alone or in a batch."""

    cache_shim: CacheShim
    layers: range
    n_rows: int


class ForwardPass(SequencePass):
    """A forward pass of one request's rows. It keeps the new KV until rows are accepted."""

    def __init__(self, request: ForwardRequest) -> None:
        self._request = request
        self.rows, self.n_rows = request.rows, request.rows.n_rows
        self.fresh: dict[int, NewKV] = {}  # by layer
        self.queries: list[Tensor] = []  # per layer q [H, len(record_queries), D]
        self._dtype = request.cache.dtype
        self._recorded_rows: Tensor | None = None  # on the device
        self._masks: dict[tuple[int | None, torch.device], Tensor | None] = {}  # by window and device of the layer
        self._sent: dict[Any, Any] = {}  # tensors that kernels put on the device once for all layers
        # the layers' cache; batch invariant rows never expand latents, even where that is faster
        may_expand = request.is_prompt and request.rows.tree_mask is None and not request.lm.is_row_invariant
        self.cache_shim = CacheShim(request.lm.latents, may_expand=may_expand and self._dtype is request.lm.dtype)
        self.layers = range(request.lm.n_layers) if request.layers is None else request.layers
        self.shows = request.record_hidden_states
        self.hidden = request.hidden  # [N, E] input of the first of these layers; after the last one, its output

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sink: Tensor | None
    ) -> Tensor:
        """Run attention in one layer: q [H, N, D], k, v [K, N, D] after rotary embedding -> [H, N, D].

        The KV cache needs no causal mask, because every stored slot is older than every row (`PositionMaskedCache` has
        one for revived tokens): only windows and empty slots are masked. All tensors are read in the cache's dtype,
        because a draft token must read its ancestors in the form in which they will be stored. With multi-head latent
        attention, rows may read each other's KV expanded from latents; the output then is a value per query head.
        """
        request, rows = self._request, self.rows
        # checked first: a cast that does nothing costs as much as a small product, in every layer
        if q.dtype is not self._dtype:
            cast = k.to(self._dtype)
            q, k, v = q.to(self._dtype), cast, cast if v is k else v.to(self._dtype)
        assert layer not in self.fresh, "a layer ran twice in one pass"
        source, is_last = request.lm.shapes[layer].shared_from, layer == self.last
        if source is not None:
            # the cache knows only the layer that stores
            layer, k, v = source, self.fresh[source].k, self.fresh[source].v
        else:
            self.fresh[layer] = NewKV(k, v)
        if request.record_queries:
            self._record_queries(q)
        if is_last:
            raise StopForward
        if request.is_prompt:
            params = replace(params, is_prompt=True)
        tree_mask, mask = rows.tree_mask, self._mask_on_device(params.window, q)
        if (expanded := self.cache_shim.expanded.get(layer)) is not None:
            latent, expanded_q, expanded_k, expanded_v = expanded
            stored = [
                PartialAttention(latent.values(p.out), p.lse) for p in request.cache.attend(layer, q, params, rows.pos)
            ]
            own = NewRows(expanded_k, expanded_v, rows.pos, tree_mask, mask, sink)
            return merge_attention([*stored, *own.parts(expanded_q, params.scale, params.softcap)])
        if (tree := rows.tree) == len(rows.ids):
            own = NewRows(k, v, rows.pos, tree_mask, mask, sink, sent=self._sent)
            return merge_attention(request.cache.attend(layer, q, params, rows.pos, own))
        assert tree_mask is not None, "lookahead rows come without a mask"
        assert mask is not None
        of_tree = NewRows(k[:, :tree], v[:, :tree], rows.pos[:tree], tree_mask[:tree, :tree], mask[:tree, :tree], sink)
        of_lookahead = NewRows(k, v, rows.pos, tree_mask[tree:], mask[tree:], sink)
        of_tree.sent = of_lookahead.sent = self._sent
        # lookahead rows have no effect on the rows of the tree
        tree_parts = request.cache.attend(layer, q[:, :tree], params, rows.pos[:tree], of_tree)
        view = request.view or request.cache
        lookahead_parts = view.attend(layer, q[:, tree:], params, rows.pos[tree:], of_lookahead)
        return torch.cat([merge_attention(parts).to(q.dtype) for parts in (tree_parts, lookahead_parts)], dim=1)

    def _record_queries(self, q: Tensor) -> None:
        """Record the queries of the requested rows in a layer."""
        if self._recorded_rows is None or self._recorded_rows.device != q.device:
            self._recorded_rows = torch.tensor(list(self._request.record_queries), device=q.device, dtype=torch.int64)
        self.queries.append(q[:, self._recorded_rows])  # a copy: a slice would keep all rows alive

    def _mask_on_device(self, window: int | None, like: Tensor) -> Tensor | None:
        """Return which rows of the pass each row attends to in a layer with this window; None = plain causal."""
        key = window, like.device
        if key not in self._masks:
            mask = self.rows.tree_mask if window is None else _band(self.rows, window)
            self._masks[key] = None if mask is None else mask.to(like.device)
        return self._masks[key]


class BatchedPass(RunningPass):
    """A forward pass that batches the passes of several sequences through the same layers. Each row attends to its own
    sequence; everything else is computed row by row."""

    cache_shim: CacheShim
    layers: range

    def __init__(self, passes: Sequence[SequencePass]) -> None:
        self._passes, self.cache_shim = passes, CacheShim(passes[0].cache_shim.latents)
        self.shows = any(p.shows for p in passes)
        self.layers = passes[0].layers
        each = [p.hidden for p in passes if p.hidden is not None]
        self.hidden = torch.cat(each) if each else None

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, sink: Tensor | None
    ) -> Tensor:
        """Run attention in one layer, as in `ForwardPass`; the rows of the sequences are concatenated."""
        counts = [p.n_rows for p in self._passes]
        keys = torch.split(k, counts, dim=1)
        values = keys if v is k else torch.split(v, counts, dim=1)
        each = zip(self._passes, torch.split(q, counts, dim=1), keys, values, strict=True)
        outs = [p.attend(layer, its_q, its_k, its_v, params, sink) for p, its_q, its_k, its_v in each]
        if layer == self.last:
            raise StopForward
        return torch.cat([out.to(q.dtype) for out in outs], dim=1)


def run_layers(
    lm: LM, requests: Sequence[ForwardRequest], way: SequencePass | BatchedPass, ids: Any, pos: Any, want: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the logits of all wanted rows, and the hidden states that the pass records; of layers that end below the
    last one no logits, and the hidden states of all rows. `ids`, `pos`, `want` (None = all rows): of all requests, on
    the host or, in captured passes, on the device.

    A pass without requested logits, as in prefill, stops at the last layer that stores keys and values. Later layers
    would have no effect, so they run only if a request records queries there.
    """
    is_below = way.layers.stop < lm.n_layers and not requests[0].only_kv
    at_end = any(len(request.want) for request in requests) or is_below or lm.recurrent_layers.are_last
    way.last = -1 if at_end else _last(lm, requests, way.layers)
    try:
        if lm.direct_forward is None:
            return call(lm.model, ids, pos, want, device=lm.entry, its_pass=way), way.hidden_states
        gave = lm.direct_forward(ids, pos, want, way, way.layers, way.hidden)
        if not is_below:
            return gave, way.hidden_states
        way.hidden = gave
    except StopForward:
        pass
    return torch.empty(0, lm.vocab, dtype=lm.dtype, device=lm.device), way.hidden if is_below else None


def _last(lm: LM, requests: Sequence[ForwardRequest], layers: range) -> int:
    """Return the last of these layers whose output is needed."""
    storing = () if any(request.record_queries for request in requests) else (i for i in lm.storing if i in layers)
    return max(storing, default=layers.stop - 1)


def state_shim(requests: Sequence[ForwardRequest], plain: CacheShim) -> StateCacheShim:
    """Return the layers' cache for a pass over these sequences of a model with recurrent layers, in place of `plain`.
    Raises BadModel if rows are no chain, or have no states."""
    ends = [0, *accumulate(request.rows.n_rows for request in requests)]
    parts = [_sequence_slice(request, slice(*of)) for request, of in zip(requests, pairwise(ends), strict=True)]
    return requests[0].lm.recurrent_layers.cache_shim(parts, plain)


def _sequence_slice(request: ForwardRequest, rows: slice) -> SequenceSlice:
    name = request.lm.info.id
    if request.states is None:
        why = "this method reads the KV cache directly, without recurrent states"
        raise refused(name, why, ["--set policy.name=window", "--set spec.method=ngram"])
    if request.rows.tree_mask is not None:
        why = "it drafts one chain only, without lookahead"
        raise refused(name, why, ["--set spec.method=ngram --set spec.branches=1"])
    assert request.states.now.at in (0, request.rows.pos[0]), "rows do not follow the recurrent state"
    is_sure = request.is_prompt or request.rows.n_rows == 1
    folding = StateUpdate(request.states.now, request.rows.n_rows, is_sure=is_sure)
    return SequenceSlice(request.states, folding, rows, tape=None if is_sure else {})


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers: [1, H, N, D], [1, K, N, D] -> [1, N, H, D]."""
    params, layer = attention_params_of(query, scaling, softcap, sliding_window), attention_layer_of(module)
    running_pass = current()
    assert running_pass is not None, "attention runs outside of a pass"
    if (latent_and_keys := latent_notes(layer_idx_of(module))) is None:
        out = running_pass.attend(layer, query[0], key[0], value[0], params, s_aux)
    else:
        latent, k = latent_and_keys
        q = latent.queries(query[0])
        is_expanded = key.shape[2] == k.shape[1] >= latent.expand_threshold
        if is_expanded:
            assert running_pass.cache_shim is not None, "no latents were noted"
            running_pass.cache_shim.expanded[layer] = latent, query[0], key[0], value[0]
        out = running_pass.attend(layer, q, k, k, params, s_aux)
        out = out if is_expanded else latent.values(out)
    out = out.unsqueeze(0).transpose(1, 2)
    return (out if out.dtype is query.dtype else out.to(query.dtype)).contiguous(), None


def layer_idx_of(module: torch.nn.Module) -> int:
    """Return `layer_idx` of an attention module: the index of its layer among all layers of the model."""
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    return layer_idx


def attention_layer_of(module: torch.nn.Module) -> int:
    """Return the index of this layer among those with attention. It differs from `layer_idx` if other layers have none
    (model_probe.py)."""
    index: int = vars(module).get(PLACE, layer_idx_of(module))
    return index


def attention_params_of(
    query: Tensor, scaling: float | None, softcap: float | None, window: int | None
) -> AttentionParams:
    """Return a layer's attention parameters, from the arguments of its attention function; query [.., D]."""
    return _params(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap or 0.0, window)


_params = lru_cache(64)(AttentionParams)  # layers pass the same few values in every pass


def _band(rows: Rows, window: int) -> Tensor | None:
    """Return the mask [N, N]: `sees` restricted to the window; `sees` itself if the window hides no row."""
    if max(rows.pos) - min(rows.pos) < window:
        return rows.tree_mask
    pos, n = torch.tensor(rows.pos), rows.n_rows
    mask = torch.ones(n, n, dtype=torch.bool).tril() if rows.tree_mask is None else rows.tree_mask
    return mask & (pos.view(1, -1) > (pos - window).view(-1, 1))
