"""Attention of rows over rows on CPU: a single row sees itself, a chunk uses torch's flash kernel, a tree products.

A chunk of a sliding layer has a mask. Products would store the scores of all its rows at once, 4 N^2 bytes per head.
For 2048 rows x 8 heads that is 128 MiB, and 2 to 3 times the time of the flash kernel (one thread, bf16 and fp32; at 64
rows both are level).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.attend.cpu import flash, square

MANY = 64  # rows with a mask; with more, the flash kernel


def attend_new_tokens(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sees: Tensor | None, softcap: float
) -> tuple[Tensor, Tensor]:
    assert not softcap, "soft-capped scores are the reference's"
    h, n, d = q.shape
    kv = k.shape[0]
    wide = torch.promote_types(q.dtype, torch.float32)
    if k.shape[1] == 1:  # plain decoding: the row sees only itself
        lse = (q.view(kv, h // kv, d).to(wide) * k).sum(-1) * scale  # [K, G]
        return v.expand(kv, h // kv, v.shape[2]).reshape(h, 1, -1), lse.view(h, 1)
    if sees is None:
        out, lse = square(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), scale, is_causal=True)
        return out[0], lse[0]
    if k.shape[1] > MANY:
        return flash(q, k, v, scale, sees)
    rows = q.reshape(kv, (h // kv) * n, d).to(wide)
    score = torch.bmm(rows, k.to(wide).transpose(1, 2)).mul_(scale)  # [K, G*n, N]
    score = score.view(kv, h // kv, *sees.shape).masked_fill_(~sees, -torch.inf).view_as(score)
    lse = torch.logsumexp(score, -1)
    out = torch.bmm(score.sub_(lse.unsqueeze(-1)).exp_(), v.to(wide))
    return out.view(h, n, -1), lse.view(h, n)
