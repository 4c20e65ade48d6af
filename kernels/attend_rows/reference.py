"""Rows over a run and each other, in plain PyTorch: the specification of `attend_rows`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.kernels.attend_rows import Run
from kvcli.kernels.merge import Part


def attend_rows(
    q: Tensor,
    run: Run | None,
    fresh: tuple[Tensor, Tensor] | None,
    pos: Sequence[int],
    scale: float,
    *,
    sees: Tensor | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    before: Sequence[Part] = (),
    sink: Tensor | None = None,
) -> Part:
    """q [H, N, D] of rows at positions pos [N] over `run`, then over the fresh rows' (k [K, N, D], v [K, N, E]).

    `sees` [N, N] bool: which fresh rows a row sees, itself among them; None = itself and all before it. `window`: a row
    sees positions above its own less the window, of fresh rows too. `softcap`: c tanh(s / c) of scaled scores.
    `before`: what the same rows saw elsewhere, older. `sink` [H]: logits that take mass and give nothing. A row that
    sees nothing gets zeros.
    """
    h, n, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = []
    n_kv = 0 if fresh is None else len(fresh[0])
    if run is not None:
        n_kv = len(run.starts)
    rows = torch.tensor(pos)
    for j in range(n_kv):
        ks, vs, shown = [], [], []
        if run is not None:
            a, b, p = run.starts[j], run.starts[j] + run.lengths[j], run.pos_starts[j]
            ks, vs = [run.k[a:b]], [run.v[a:b]]
            at = run.pos[p : p + run.lengths[j]].long()
            shown = [torch.ones(n, b - a, dtype=torch.bool) if window is None else at > (rows - window).unsqueeze(1)]
        if fresh is not None:
            ks, vs = [*ks, fresh[0][j]], [*vs, fresh[1][j]]
            mine = torch.ones(n, n, dtype=torch.bool).tril() if sees is None else sees
            shown.append(mine if window is None else mine & (rows > (rows - window).unsqueeze(1)))
        k, v, mask = torch.cat(ks).to(wide), torch.cat(vs).to(wide), torch.cat(shown, 1)
        score = q[j * (h // n_kv) : (j + 1) * (h // n_kv)].to(wide) @ k.T * scale  # [G, N, S]
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        score = score.masked_fill(~mask, -torch.inf)
        lse = torch.logsumexp(score, -1)
        heads.append((torch.softmax(score, -1).nan_to_num(0.0) @ v, lse))
    out, lse = torch.cat([o for o, _ in heads]), torch.cat([e for _, e in heads])
    parts = [*before, Part(out, lse)]
    lses = [p.lse.to(wide) for p in parts] + ([] if sink is None else [sink.to(wide).unsqueeze(1).expand(h, n)])
    total = torch.logsumexp(torch.stack(lses), 0)
    weights = [torch.exp(e - total).nan_to_num(0.0).unsqueeze(-1) for e in lses]
    # a sink's weight is behind those of the parts
    return Part(torch.stack([p.out.to(wide) * w for p, w in zip(parts, weights, strict=False)]).sum(0), total)
