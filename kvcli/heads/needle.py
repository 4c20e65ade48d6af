"""Needle probe for copy heads: attention of the rows that generate a hidden value (after Wu et al., arXiv 2404.15574).

A head need not attend to the very token to be generated: it may attend to a token next to it, or to one after the value
that carries its information. So attention is measured at every offset from -4 to +8, and the best offset counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest, ForwardResult
from kvcli.kv.slots import AttentionParams, KVCache, window_start
from kvcli.kv.sparse.index import scale_and_softcap

if TYPE_CHECKING:
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.heads.sample import ProbeSample

OFFSETS = range(-4, 9)


def needle(session: GenerationSession, sample: ProbeSample) -> Tensor:
    """Return attention [L, H, O] of each query head at each of OFFSETS from the token to generate, mean over rows."""
    target = torch.tensor(sample.targets(), device=session.lm.device).unsqueeze(1)
    around = target + torch.tensor(OFFSETS, device=session.lm.device)  # [w, O]
    return torch.stack([_around(layer, around) for layer in looks(session, sample)])


def _around(layer: Iterable[tuple[Tensor, Tensor]], around: Tensor) -> Tensor:
    """Return attention [H, O] at the positions `around` in one layer, mean over rows."""
    found = []
    for weight, pos in layer:
        past = weight[..., : len(pos)]
        slot = torch.searchsorted(pos.long(), around.clamp(min=0)).clamp(max=past.shape[-1] - 1)
        there = (pos[slot] == around).to(past.dtype)  # [w, O]: an offset may be outside the text
        found.append((past.gather(2, slot.expand(past.shape[0], -1, -1)) * there).mean(1))
    return torch.cat(found)


def looks(session: GenerationSession, sample: ProbeSample) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
    """Yield by layer and KV head the attention [G, w, S + N] of the rows that generate the values, over the stored
    slots and the rows of the pass, with the slots' positions [S]. The one forward pass is not committed.
    """
    rows, scored = sample.rows(), [row for row, _ in sample.scored()]
    request = ForwardRequest(session.lm, rows, session.cache, want=scored, record_queries=scored, states=session.states)
    (made,) = run([request])
    for layer in range(session.lm.n_layers):
        yield _weights(request, session.cache, made, layer)


def _weights(request: ForwardRequest, kv: KVCache, made: ForwardResult, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
    params, s = request.lm.attention_params[layer], kv.slots(layer)
    rows, recorded = request.rows, list(request.record_queries)
    q, pos = made.queries[layer].float(), [rows.pos[row] for row in recorded]
    among = torch.ones(rows.n_rows, rows.n_rows, dtype=torch.bool).tril() if rows.tree_mask is None else rows.tree_mask
    n_kv = s.k.shape[0]
    for head in range(n_kv):
        group = q[head * (q.shape[0] // n_kv) : (head + 1) * (q.shape[0] // n_kv)]  # [G, w, D]
        past = _scores(group, s.k[head], params)
        hidden = (s.pos[head] < 0).expand(len(recorded), -1)
        if params.window is not None:
            hidden = hidden | (s.pos[head] <= window_start(pos, params.window, s.pos.device))
        past = past.masked_fill(hidden, -torch.inf)
        fresh = _scores(group, made.fresh[layer].k[head], params).masked_fill(~among[recorded].to(q.device), -torch.inf)
        yield torch.cat((past, fresh), -1).softmax(-1), s.pos[head]


def _scores(q: Tensor, k: Tensor, params: AttentionParams) -> Tensor:
    """Return the scores of q [G, w, D] and k [S, D] -> [G, w, S]."""
    return scale_and_softcap(torch.matmul(q, k.float().T), params)
