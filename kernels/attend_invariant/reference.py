"""Attention over stored slots and new rows in plain PyTorch: the specification of `attend_invariant`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant.inputs import SelectedPages, StoredKV
from kvcli.kernels.merge_attention import PartialAttention


def attend_invariant(
    q: Tensor,
    run: StoredKV | None,
    fresh: tuple[Tensor, Tensor] | None,
    pos: Sequence[int],
    scale: float,
    *,
    sees: Tensor | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    before: Sequence[PartialAttention] = (),
    sink: Tensor | None = None,
    chosen: SelectedPages | None = None,
) -> PartialAttention:
    """Compute attention of q [H, N, D] over `run`, or each row's pages of it, then over new k [K, M, D], v [K, M, E].

    The query rows are the last N of the M; `pos` [M] are the positions of all. `sees` [N, M] bool: the new rows that a
    row sees, including itself; None = itself and all before it. `window`: a row sees positions from 0 on above its own
    minus the window, also of new rows. `softcap`: c tanh(s / c) of scaled scores.
    `before`: partial attention of the same rows over older slots. `sink` [H]: attention sink logits, which add mass and
    no value. A row that sees no slot gets zeros.
    """
    h, n, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = []
    n_kv = 0 if fresh is None else len(fresh[0])
    if run is not None:
        n_kv = len(run.starts)
    rows = torch.tensor(pos)
    asking = rows[-n:]
    for j in range(n_kv):
        ks, vs, shown = [], [], []
        if run is not None:
            a, b, p = run.starts[j], run.starts[j] + run.lengths[j], run.pos_starts[j]
            ks, vs = [run.k[a:b]], [run.v[a:b]]
            at = run.pos[p : p + run.lengths[j]].long()
            opens = None if window is None else (asking - window).clamp_min(-1).unsqueeze(1)
            shown = [torch.ones(n, b - a, dtype=torch.bool) if opens is None else at > opens]
            if chosen is not None:
                mine = chosen.pages[j].repeat_interleave(chosen.page, 1)[:, : b - a]
                mine = torch.nn.functional.pad(mine, (0, b - a - mine.shape[1]))
                mine[:, chosen.behind[j] : chosen.behind[j] + chosen.left[j]] = True
                shown[0] &= mine
        if fresh is not None:
            ks, vs = [*ks, fresh[0][j]], [*vs, fresh[1][j]]
            m = fresh[0].shape[1]
            mine = torch.ones(n, m, dtype=torch.bool).tril(m - n) if sees is None else sees
            shown.append(mine if window is None else mine & (rows > (asking - window).unsqueeze(1)))
        k, v, mask = torch.cat(ks).to(wide), torch.cat(vs).to(wide), torch.cat(shown, 1)
        score = q[j * (h // n_kv) : (j + 1) * (h // n_kv)].to(wide) @ k.T * scale  # [G, N, S]
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        score = score.masked_fill(~mask, -torch.inf)
        lse = torch.logsumexp(score, -1)
        heads.append((torch.softmax(score, -1).nan_to_num(0.0) @ v, lse))
    out, lse = torch.cat([o for o, _ in heads]), torch.cat([e for _, e in heads])
    parts = [*before, PartialAttention(out, lse)]
    lses = [p.lse.to(wide) for p in parts] + ([] if sink is None else [sink.to(wide).unsqueeze(1).expand(h, n)])
    total = torch.logsumexp(torch.stack(lses), 0)
    weights = [torch.exp(e - total).nan_to_num(0.0).unsqueeze(-1) for e in lses]
    # a sink's weight follows those of the parts
    return PartialAttention(
        torch.stack([p.out.to(wide) * w for p, w in zip(parts, weights, strict=False)]).sum(0), total
    )
