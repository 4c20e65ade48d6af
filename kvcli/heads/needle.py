"""Copy heads: where the rows that write a hidden value look (after Wu et al., arXiv 2404.15574).

A head need not look at the very token that is to be written: it may read one next to it, or one behind the value that
carries it. So the weight is taken at every offset from -4 to +8 around it and the best offset counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.forward import Pass, run
from kvcli.heads.attention import bent

if TYPE_CHECKING:
    from kvcli.heads.sample import Sample
    from kvcli.kv.slots import Sight
    from kvcli.session import Session

OFFSETS = range(-4, 9)


def needle(session: Session, sample: Sample) -> Tensor:
    """[L, H, O] weight of each query head at each of OFFSETS from the token its row has to write, mean over rows."""
    lm = session.lm
    rows, scored = sample.rows(lm.device), [row for row, _ in sample.scored()]
    p = Pass(rows, session.kv, hear=scored)
    run(lm, p, torch.tensor(scored, device=lm.device))
    target = torch.tensor(sample.targets(), device=lm.device).unsqueeze(1)
    around = target + torch.tensor(OFFSETS, device=lm.device)  # [w, O]
    return torch.stack([_around(session, p, layer, around) for layer in range(lm.n_layers)])


def _around(session: Session, p: Pass, layer: int, around: Tensor) -> Tensor:
    """[H, O] of one layer."""
    assert p.hear is not None
    sight, s = session.lm.sights[layer], session.kv.slots(layer)
    q, pos = p.queries[layer].float(), p.rows.pos[p.hear]
    sees = p.rows.sees
    among = torch.ones(p.rows.n_rows, p.rows.n_rows, dtype=torch.bool).tril() if sees is None else sees
    kv, found = s.k.shape[0], []
    for head in range(kv):
        group = q[head * (q.shape[0] // kv) : (head + 1) * (q.shape[0] // kv)]  # [G, w, D]
        past = _scores(group, s.k[head], sight)
        hidden = (s.pos[head] < 0).expand(len(p.hear), -1)
        if sight.window is not None:
            hidden = hidden | (s.pos[head] <= pos.unsqueeze(1) - sight.window)
        past = past.masked_fill(hidden, -torch.inf)
        fresh = _scores(group, p.fresh[layer][0][head], sight).masked_fill(~among[p.hear].to(q.device), -torch.inf)
        weight = torch.cat((past, fresh), -1).softmax(-1)[..., : past.shape[-1]]  # [G, w, S]
        slot = torch.searchsorted(s.pos[head].long(), around.clamp(min=0)).clamp(max=past.shape[-1] - 1)
        there = (s.pos[head][slot] == around).to(weight.dtype)  # [w, O]: an offset may lie outside the text
        found.append((weight.gather(2, slot.expand(weight.shape[0], -1, -1)) * there).mean(1))
    return torch.cat(found)


def _scores(q: Tensor, k: Tensor, sight: Sight) -> Tensor:
    """q [G, w, D], k [S, D] -> [G, w, S]."""
    return bent(torch.matmul(q, k.float().T), sight)
