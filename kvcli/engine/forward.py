"""One pass: rows through the model, attending to the past, a view and each other.

The seam to transformers is the function `attention`, registered once, which finds its pass on a stack, and a
`CacheShim` where layers expect their cache (cache_shim.py). Layers, rotary embeddings, norms and the head stay
transformers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcli.engine.forward_request import NewKV
from kvcli.engine.hf.cache_shim import CacheShim, current, latent_notes
from kvcli.engine.hf.layer_gates import StopForward
from kvcli.engine.rows import Rows
from kvcli.kernels.attend_invariant import NewRows
from kvcli.kernels.merge_attention import PartialAttention, merge_attention
from kvcli.kv.slots import AttentionParams

if TYPE_CHECKING:
    from kvcli.engine.cuda_graphs.captured_pass import CapturedForward
    from kvcli.engine.forward_request import ForwardRequest

PLACE = "kvcli_place"  # of ours in an attention module


class ForwardPass:
    """One trip of a feed's rows through the model; what it made stays here until its rows are accepted."""

    last = -1  # the layer after which nothing more is wanted; -1 = run to the logits
    shown: Tensor | None = None  # [n, E]: what the output layer was given, where the feed wants that

    @property
    def n_rows(self) -> int:
        return len(self.rows.ids)

    def __init__(self, feed: ForwardRequest) -> None:
        self._feed = feed
        self.rows = feed.rows
        self.fresh: dict[int, NewKV] = {}  # by layer
        self.queries: list[Tensor] = []  # per layer q [H, len(hear), D]
        self._dtype = feed.cache.dtype
        self._hear: Tensor | None = None  # on the device
        self._seen: dict[tuple[int | None, torch.device], Tensor | None] = {}  # by window, on the layer's device
        self._sent: dict[Any, Any] = {}  # by what kernels have put there for all layers
        # what layers get as their cache; a row that has its bits in any company is read in one way, whatever that costs
        may_expand = feed.is_prompt and feed.rows.sees is None and not feed.lm.is_row_invariant
        self.trial = CacheShim(feed.lm.latents, may_expand=may_expand and self._dtype is feed.lm.dtype)
        self.layers = range(feed.lm.n_layers) if feed.layers is None else feed.layers
        self.shows = feed.record_hidden_states
        self.hidden = feed.hidden  # [N, E] before the first of these; behind the last, what they gave

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sight: AttentionParams, sink: Tensor | None
    ) -> Tensor:
        """One layer: q [H, N, D], k, v [K, N, D] after rotary embedding -> [H, N, D].

        No mask over the past exists: every stored slot is older than every row, so the only mask is N x N. All is
        read in the store's numbers: a guess must see its ancestors as it will once they are stored. Where latents are
        expanded, rows read each other so, and what is given is values of heads.
        """
        feed, rows = self._feed, self.rows
        if q.dtype is not self._dtype:  # asking for it costs as much as a small product, in every layer
            cast = k.to(self._dtype)
            q, k, v = q.to(self._dtype), cast, cast if v is k else v.to(self._dtype)
        assert layer not in self.fresh, "a layer runs once"
        source, is_last = feed.lm.shapes[layer].shared_from, layer == self.last
        if source is not None:
            layer, k, v = source, self.fresh[source].k, self.fresh[source].v  # stores know the one that stores
        else:
            self.fresh[layer] = NewKV(k, v)
        if feed.record_queries:
            self._listen(q)
        if is_last:
            raise StopForward
        if feed.is_prompt:
            sight = replace(sight, is_prompt=True)
        line, sees = rows.sees, self._sees(sight.window, q)
        if (expanded := self.trial.expanded.get(layer)) is not None:
            latent, wide, its_k, its_v = expanded
            past = [PartialAttention(latent.values(p.out), p.lse) for p in feed.cache.attend(layer, q, sight, rows.pos)]
            return merge_attention(
                [*past, *NewRows(its_k, its_v, rows.pos, line, sees, sink).parts(wide, sight.scale, sight.softcap)]
            )
        if (tree := rows.tree) == len(rows.ids):
            own = NewRows(k, v, rows.pos, line, sees, sink, sent=self._sent)
            return merge_attention(feed.cache.attend(layer, q, sight, rows.pos, own))
        assert line is not None, "scouts stand beside a tree"
        assert sees is not None
        of_tree = NewRows(k[:, :tree], v[:, :tree], rows.pos[:tree], line[:tree, :tree], sees[:tree, :tree], sink)
        for_scouts = NewRows(k, v, rows.pos, line[tree:], sees[tree:], sink)
        of_tree.sent = for_scouts.sent = self._sent
        its = feed.cache.attend(layer, q[:, :tree], sight, rows.pos[:tree], of_tree)  # scouts change nothing of it
        theirs = (feed.view or feed.cache).attend(layer, q[:, tree:], sight, rows.pos[tree:], for_scouts)
        return torch.cat([merge_attention(parts).to(q.dtype) for parts in (its, theirs)], dim=1)

    def _listen(self, q: Tensor) -> None:
        """Keep the queries of the heard rows in a layer."""
        if self._hear is None or self._hear.device != q.device:
            self._hear = torch.tensor(list(self._feed.record_queries), device=q.device, dtype=torch.int64)
        self.queries.append(q[:, self._hear])  # a copy: a slice would keep all rows alive

    def _sees(self, window: int | None, like: Tensor) -> Tensor | None:
        """Which fresh rows a row sees in a layer with this window; None = plain causal."""
        key = window, like.device
        if key not in self._seen:
            sees = self.rows.sees if window is None else _band(self.rows, window)
            self._seen[key] = None if sees is None else sees.to(like.device)
        return self._seen[key]


class BatchedPass:
    """Passes of several texts in one trip through the same layers: each row attends to its own text, and everything
    else is row by row."""

    last = -1
    shown: Tensor | None = None

    def __init__(self, passes: Sequence[ForwardPass | CapturedForward]) -> None:
        self._passes, self.trial = passes, CacheShim(passes[0].trial.latents)
        self.shows = any(p.shows for p in passes)
        self.layers = passes[0].layers
        each = [p.hidden for p in passes if p.hidden is not None]
        self.hidden = torch.cat(each) if each else None

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sight: AttentionParams, sink: Tensor | None
    ) -> Tensor:
        """As of one pass, their rows one text behind the other."""
        counts = [p.n_rows for p in self._passes]
        keys = torch.split(k, counts, dim=1)
        values = keys if v is k else torch.split(v, counts, dim=1)
        each = zip(self._passes, torch.split(q, counts, dim=1), keys, values, strict=True)
        outs = [p.attend(layer, its_q, its_k, its_v, sight, sink) for p, its_q, its_k, its_v in each]
        if layer == self.last:
            raise StopForward
        return torch.cat([out.to(q.dtype) for out in outs], dim=1)


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
    sight = attention_params_of(query, scaling, softcap, sliding_window)
    layer, own = layer_index_of(module), own_number(module)
    its_pass: Any = current()  # a pass, or several side by side
    if (held := latent_notes(own)) is None:
        out = its_pass.attend(layer, query[0], key[0], value[0], sight, s_aux)
    else:
        latent, k = held
        q = latent.queries(query[0])
        is_expanded = key.shape[2] == k.shape[1] >= latent.expand_threshold
        if is_expanded:
            its_pass.trial.expanded[layer] = latent, query[0], key[0], value[0]
        out = its_pass.attend(layer, q, k, k, sight, s_aux)
        out = out if is_expanded else latent.values(out)
    out = out.unsqueeze(0).transpose(1, 2)
    return (out if out.dtype is query.dtype else out.to(query.dtype)).contiguous(), None


def own_number(module: torch.nn.Module) -> int:
    """Of the layer among all, as it names itself to its cache."""
    number: int = module.layer_idx  # type: ignore[assignment]
    return number


def layer_index_of(module: torch.nn.Module) -> int:
    """Which of the layers that attend this is: where others do not, its own number is another (model_probe.py)."""
    place: int = vars(module).get(PLACE, own_number(module))
    return place


def attention_params_of(
    query: Tensor, scaling: float | None, softcap: float | None, window: int | None
) -> AttentionParams:
    """How a layer looks at slots, from what it hands to its attention function; query [.., D]."""
    return _sight(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap or 0.0, window)


_sight = lru_cache(64)(AttentionParams)  # layers hand over the same few in every pass


def _band(rows: Rows, window: int) -> Tensor | None:
    """[N, N]: what `sees` allows and the window does not hide; what it allows when the window hides nothing."""
    if max(rows.pos) - min(rows.pos) < window:
        return rows.sees
    pos, n = torch.tensor(rows.pos), rows.n_rows
    sees = torch.ones(n, n, dtype=torch.bool).tril() if rows.sees is None else rows.sees
    return sees & (pos.view(1, -1) > (pos - window).view(-1, 1))
