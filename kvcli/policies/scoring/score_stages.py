"""Score stages (`policy.post`): functions that change scores after head budgets are set and before slots are selected.

Each function takes the scores [K, S] of one layer, the slots, the layer context and the slot budgets of heads [K], and
returns new scores. Slots of score +inf are always kept and slots of score -inf do not compete; a stage changes neither.
A stage sets the score of a slot to +inf to keep it in any case.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcli.engine.policy.policy import LayerContext
from kvcli.kv.slots import Slots
from kvcli.policies.scoring import selection, token_units

Post = Callable[[Tensor, "Slots", "LayerContext", Tensor], Tensor]

FIRST = 0.5  # critical: share of the budget chosen by the score alone, as published
EPSILON = 1e-4  # critical: added to a score before it is multiplied by the value norm, as in the authors' code
SOURCES = 0.3  # graph: share of a head's budget used as damping sources, the best value of the paper
NEAR = 4  # graph: neighbours that each source damps; the paper says few
BLOCK = 256  # graph: tokens compared with all others at a time
PROXIES = 0.25  # crush: share of the budget for representatives of evicted slots


def critical(score: Tensor, s: Slots, at: LayerContext, counts: Tensor) -> Tensor:
    """Rank half of the budget by score and the rest by score times the L1 norm of the projected value (W_o v).

    CriticalKV (Feng et al., arXiv 2502.03805). As in kvpress, the norm is the mean over the query heads of a KV head.
    """
    weighed = (score + EPSILON) * at.policy_state.outward(at.layer, s.v, 1).mean(1).to(score.dtype)
    first = selection.top(score, s.pos, (FIRST * counts).long())
    found: Tensor = weighed.where(score.isfinite(), score).masked_fill(first, torch.inf)
    return found


def graph(score: Tensor, s: Slots, at: LayerContext, counts: Tensor) -> Tensor:
    """Lower the scores of tokens with keys similar to the best tokens' keys (GraphKV, Li et al., arXiv 2509.00388).

    The sources of a head are its best-scoring tokens, `SOURCES` of its budget. A token's score is multiplied by one
    minus the cosine, once for each other source that has the token among its `NEAR` nearest; sources damp each other,
    too. One round is run, because most of the paper's gain comes from the first. Not in the paper: the fixed number of
    neighbours (the paper adapts it), no damping by a cosine below 0, and no damping by protected tokens.
    """
    if not s.n_slots:
        return score
    k, may, found = token_units.wide(s.k), torch.isfinite(score), score.clone()
    k = k / k.norm(dim=2, keepdim=True).clamp_min(torch.finfo(k.dtype).tiny)
    sources = selection.top(score.masked_fill(~may, -torch.inf), s.pos, (SOURCES * _open(score, counts)).long())
    for head in range(k.shape[0]):
        signal = torch.zeros_like(score[head])  # [S] logarithm of the factor of each score
        for those in torch.split(sources[head].nonzero().flatten(), BLOCK):
            cosine = (k[head, those] @ k[head].T).masked_fill(~may[head], -torch.inf)  # [n, S]
            cosine[torch.arange(len(those), device=k.device), those] = -torch.inf
            near, where = cosine.topk(min(NEAR, cosine.shape[1]), dim=1)
            signal.scatter_add_(0, where.flatten(), (1 - near.clamp(0, 1)).log().to(score.dtype).flatten())
        found[head] = torch.where(may[head], score[head] * signal.exp(), score[head])
    return found


def _open(score: Tensor, counts: Tensor) -> Tensor:
    """Return the budget of each head [K] minus its protected slots."""
    return (counts - torch.isposinf(score).sum(1)).clamp(min=0)


def crush(score: Tensor, s: Slots, at: LayerContext, counts: Tensor) -> Tensor:
    """Spend a part of the budget on tokens that represent the evicted ones (KVCrush, Jha et al., arXiv 2503.00022).

    A token is described by one bit per head of the layer: whether the token is in the better half of the head's
    competing tokens, as in OpenVINO's code for KVCrush. Tokens that a head does not keep by score are sorted by the
    number of bits that differ from the majority (the Hamming distance to an anchor) and split into as many groups as
    the remaining budget. One token of each group is kept. Not in the paper: the middle token is kept, chosen per head
    and per token, whereas OpenVINO's code selects pages, the same in all heads.
    """
    proxies = (PROXIES * _open(score, counts)).long()
    if not s.n_slots or not bool(proxies.any()):
        return score
    may = torch.isfinite(score)
    better = selection.top(score.masked_fill(~may, -torch.inf), s.pos, may.sum(1) // 2)
    bits = token_units.by_position(better.to(torch.float32), s.pos, at.n, 0.0)  # [K, n]
    best, found = selection.top(score, s.pos, counts - proxies), score.clone()
    for head, places in enumerate(proxies.tolist()):
        rest = (may[head] & ~best[head]).nonzero().flatten()
        count = min(places, len(rest))
        rest = rest[s.pos[head, rest].argsort()]
        theirs = bits[:, s.pos[head, rest].long()]  # [K, rest]
        anchor = theirs.mean(1, keepdim=True) > 0.5
        distance = (theirs.bool() != anchor).sum(0)
        rest = rest[distance.argsort(stable=True)]
        middle = (2 * torch.arange(count, device=rest.device) + 1) * len(rest) // max(1, 2 * count)
        found[head, rest[middle]] = torch.inf
        found[head, best[head]] = torch.inf
    return found


def fair(score: Tensor, s: Slots, at: LayerContext, counts: Tensor) -> Tensor:
    """Give each paragraph or message its share of a head's budget (fair eviction, Chen et al., arXiv 2510.00231).

    So no instruction is evicted entirely in favour of others. The score ranks the tokens within a span. Not in the
    paper: the score is the policy's, whereas in the paper each span scores its tokens itself.
    """
    if not s.n_slots:
        return score
    spans = token_units.numbered("shot", at.kinds, at.n, s.pos.device)[s.pos.clamp(min=0).long()]  # [K, S]
    may, found = torch.isfinite(score), score.clone()
    for head, count in enumerate(_open(score, counts).tolist()):
        rest = may[head].nonzero().flatten()
        rest = rest[s.pos[head, rest].argsort(descending=True)]
        rest = rest[score[head, rest].argsort(descending=True, stable=True)]
        rest = rest[spans[head, rest].argsort(stable=True)]  # grouped by span, best tokens first
        _, of, sizes = torch.unique_consecutive(spans[head, rest], return_inverse=True, return_counts=True)
        given = [min(count, len(rest)) * size / max(1, len(rest)) for size in sizes.tolist()]
        places = torch.tensor(selection.whole(given, min(count, len(rest)), len(rest)), device=rest.device)
        place = torch.arange(len(rest), device=rest.device) - (sizes.cumsum(0) - sizes)[of]
        found[head, rest[place < places[of]]] = torch.inf
    return found


POSTS: dict[str, Post] = {"critical": critical, "graph": graph, "crush": crush, "fair": fair}
