"""What a score becomes before slots are chosen by it: one function a stage, of one layer.

Each takes scores [K, S], the slots, the moment and how many slots a head is to keep on average, and gives scores. +inf
is kept before all others and -inf takes no part; both stay what they are. Where a stage puts a slot among those that
are kept before all others, it gets +inf, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.policies import budgets, units

if TYPE_CHECKING:
    from kvcli.engine.policy import Moment
    from kvcli.kv.slots import Slots

Post = Callable[[Tensor, "Slots", "Moment", int], Tensor]

FIRST = 0.5  # of critical: share of the budget chosen by the score alone, as published
EPSILON = 1e-4  # of critical, added to a score before it is weighed, as in the authors' code
ROUNDS = 4  # of graph: in which those that are kept are found
NEAR = 4  # of graph: neighbours that each of them damps
BLOCK = 256  # of graph: tokens compared with all others at a time
PROXIES = 0.25  # of crush: share of the budget for representatives of what goes


def critical(score: Tensor, s: Slots, at: Moment, each: int) -> Tensor:
    """Half by the score, the rest by the score times the L1 norm of what the value adds to the stream.

    CriticalKV (Feng et al., arXiv 2502.03805); as in kvpress, the norm is the mean over the query heads that share it.
    """
    weighed = (score + EPSILON) * at.memory.outward(at.layer, s.v, 1).mean(1).to(score.dtype)
    first = budgets.uniform(score, s.pos, int(FIRST * each))
    found: Tensor = weighed.where(score.isfinite(), score).masked_fill(first, torch.inf)
    return found


def graph(score: Tensor, s: Slots, at: Moment, each: int) -> Tensor:
    """Whoever is chosen damps the tokens whose keys are nearest to its own (GraphKV, Li et al., arXiv 2509.00388).

    A neighbour's score is multiplied by one minus the cosine, once for each of the chosen that it is near to. The kept
    are found in `ROUNDS`, as the paper lets the signal spread repeatedly.
    """
    if not s.n_slots:
        return score
    k = units.wide(s.k)
    k = k / k.norm(dim=2, keepdim=True).clamp_min(torch.finfo(k.dtype).tiny)
    score, done = score.clone(), torch.isposinf(score)  # the protected damp nobody: they would empty the text's end
    for end in (each * n // ROUNDS for n in range(1, ROUNDS + 1)):
        chosen = budgets.uniform(score.masked_fill(done, torch.inf), s.pos, end) & ~done
        done |= chosen
        may = torch.isfinite(score) & ~done
        for head in range(k.shape[0]):
            for those in torch.split(chosen[head].nonzero().flatten(), BLOCK):
                cosine = (k[head, those] @ k[head].T).masked_fill(~may[head], -torch.inf)  # [n, S]
                near, where = cosine.topk(min(NEAR, cosine.shape[1]), dim=1)
                damped = (1 - near.clamp(0, 1)).log().to(score.dtype)
                total = torch.zeros_like(score[head]).scatter_add_(0, where.flatten(), damped.flatten())
                score[head] = torch.where(may[head], score[head] * total.exp(), score[head])
    return score


def crush(score: Tensor, s: Slots, at: Moment, each: int) -> Tensor:
    """A part of the budget goes to tokens that stand for the others (KVCrush, Jha et al., arXiv 2503.00022).

    A token is the list of the layer's heads that would keep it. Those that a head does not keep by score are sorted by
    how many heads say otherwise than the majority (the Hamming distance to an anchor) and cut into as many groups as
    places are left; the middle one of each stays.
    """
    proxies = int(PROXIES * each)
    if not proxies or not s.n_slots:
        return score
    says = budgets.uniform(score, s.pos, each)
    bits = units.by_position(says.to(torch.float32), s.pos, at.n, 0.0)  # [K, n]
    best, found = budgets.uniform(score, s.pos, each - proxies), score.clone()
    for head in range(score.shape[0]):
        rest = (torch.isfinite(score[head]) & ~best[head]).nonzero().flatten()
        count = min(proxies, len(rest))
        rest = rest[s.pos[head, rest].argsort()]
        theirs = bits[:, s.pos[head, rest].long()]  # [K, rest]
        anchor = theirs.mean(1, keepdim=True) > 0.5
        distance = (theirs.bool() != anchor).sum(0)
        rest = rest[distance.argsort(stable=True)]
        middle = (2 * torch.arange(count, device=rest.device) + 1) * len(rest) // max(1, 2 * count)
        found[head, rest[middle]] = torch.inf
        found[head, best[head]] = torch.inf
    return found


POSTS: dict[str, Post] = {"critical": critical, "graph": graph, "crush": crush}
