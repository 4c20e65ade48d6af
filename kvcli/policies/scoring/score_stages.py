"""What a score becomes once it says how much each head keeps, and before slots are chosen by it: a function a stage.

Each takes scores [K, S] of one layer, the slots, the moment and how many slots each head keeps [K], and gives scores.
+inf is kept before all others and -inf takes no part; both stay what they are. Where a stage puts a slot among those
that are kept before all others, it gets +inf, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.policies.scoring import selection, token_units

if TYPE_CHECKING:
    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots

Post = Callable[[Tensor, "Slots", "LayerContext", Tensor], Tensor]

FIRST = 0.5  # of critical: share of the budget chosen by the score alone, as published
EPSILON = 1e-4  # of critical, added to a score before it is weighed, as in the authors' code
SOURCES = 0.3  # of graph: share of a head's budget that damps others, the best of the paper's
NEAR = 4  # of graph: neighbours that each of them damps; the paper says few
BLOCK = 256  # of graph: tokens compared with all others at a time
PROXIES = 0.25  # of crush: share of the budget for representatives of what goes


def critical(score: Tensor, s: Slots, at: LayerContext, counts: Tensor) -> Tensor:
    """Half by the score, the rest by the score times the L1 norm of what the value adds to the stream.

    CriticalKV (Feng et al., arXiv 2502.03805); as in kvpress, the norm is the mean over the query heads that share it.
    """
    weighed = (score + EPSILON) * at.memory.outward(at.layer, s.v, 1).mean(1).to(score.dtype)
    first = selection.top(score, s.pos, (FIRST * counts).long())
    found: Tensor = weighed.where(score.isfinite(), score).masked_fill(first, torch.inf)
    return found


def graph(score: Tensor, s: Slots, at: LayerContext, counts: Tensor) -> Tensor:
    """The best damp the tokens whose keys are nearest to their own (GraphKV, Li et al., arXiv 2509.00388).

    Of each head the sources are what scores best, `SOURCES` of what it keeps. A token's score is multiplied by one
    minus the cosine, once for each other source that has it among its `NEAR` nearest; sources damp each other, too.
    One round, as most of what the paper gains comes from the first. Ours: how many neighbours (the paper adapts their
    number), that a cosine below 0 damps nothing, and that the protected damp nobody.
    """
    if not s.n_slots:
        return score
    k, may, found = token_units.wide(s.k), torch.isfinite(score), score.clone()
    k = k / k.norm(dim=2, keepdim=True).clamp_min(torch.finfo(k.dtype).tiny)
    sources = selection.top(score.masked_fill(~may, -torch.inf), s.pos, (SOURCES * _open(score, counts)).long())
    for head in range(k.shape[0]):
        signal = torch.zeros_like(score[head])  # [S] the logarithm of what a score is multiplied by
        for those in torch.split(sources[head].nonzero().flatten(), BLOCK):
            cosine = (k[head, those] @ k[head].T).masked_fill(~may[head], -torch.inf)  # [n, S]
            cosine[torch.arange(len(those), device=k.device), those] = -torch.inf
            near, where = cosine.topk(min(NEAR, cosine.shape[1]), dim=1)
            signal.scatter_add_(0, where.flatten(), (1 - near.clamp(0, 1)).log().to(score.dtype).flatten())
        found[head] = torch.where(may[head], score[head] * signal.exp(), score[head])
    return found


def _open(score: Tensor, counts: Tensor) -> Tensor:
    """[K] places of each head that what is protected leaves."""
    return (counts - torch.isposinf(score).sum(1)).clamp(min=0)


def crush(score: Tensor, s: Slots, at: LayerContext, counts: Tensor) -> Tensor:
    """A part of the budget goes to tokens that stand for the others (KVCrush, Jha et al., arXiv 2503.00022).

    A token is the list of the layer's heads that have it in the better half of those that compete, as in OpenVINO's
    code for it. Those that a head does not keep by score are sorted by how many heads say otherwise than the majority
    (the Hamming distance to an anchor) and cut into as many groups as places are left; one of each stays. Ours: the
    middle one, of each head its own and token by token, where that code takes pages, the same in all heads.
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
    """Each paragraph or message keeps its share of what the head keeps (fair eviction, Chen et al., arXiv 2510.00231).

    So no instruction is forgotten for the sake of others. Which of its tokens, the score says; ours: that is the
    method's own, where the paper has each span vote for itself.
    """
    if not s.n_slots:
        return score
    spans = token_units.numbered("shot", at.kinds, at.n, s.pos.device)[s.pos.clamp(min=0).long()]  # [K, S]
    may, found = torch.isfinite(score), score.clone()
    for head, count in enumerate(_open(score, counts).tolist()):
        rest = may[head].nonzero().flatten()
        rest = rest[s.pos[head, rest].argsort(descending=True)]
        rest = rest[score[head, rest].argsort(descending=True, stable=True)]
        rest = rest[spans[head, rest].argsort(stable=True)]  # span by span, the best of each first
        _, of, sizes = torch.unique_consecutive(spans[head, rest], return_inverse=True, return_counts=True)
        given = [min(count, len(rest)) * size / max(1, len(rest)) for size in sizes.tolist()]
        places = torch.tensor(selection.whole(given, min(count, len(rest)), len(rest)), device=rest.device)
        place = torch.arange(len(rest), device=rest.device) - (sizes.cumsum(0) - sizes)[of]
        found[head, rest[place < places[of]]] = torch.inf
    return found


POSTS: dict[str, Post] = {"critical": critical, "graph": graph, "crush": crush, "fair": fair}
