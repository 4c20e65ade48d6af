"""Attention of rows over slots in plain PyTorch: the specification of `attend`.

The query heads that share a KV head become rows, so K/V are read once and never repeated. Slots are processed in
blocks, so that scores fit in cache; blocks are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 4096  # slots; scores of 8 rows x 32 heads in float32 are then 4 MiB


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float,
    mask: Tensor | None,
    length: int | Sequence[int],
    upto: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    h, n, d = q.shape
    if upto is not None or not isinstance(length, int):
        lengths = [length] if isinstance(length, int) else length
        mask, length = within(lengths, n, q.device, upto), max(lengths)
    kv, s = k.shape[0], length
    exact = torch.promote_types(q.dtype, torch.float32)
    rows = q.reshape(kv, (h // kv) * n, d).to(exact) * scale  # [K, G*N, D]
    acc = torch.zeros(kv, rows.shape[1], v.shape[2], dtype=exact, device=q.device)
    top = torch.full(rows.shape[:2], -torch.inf, dtype=exact, device=q.device)  # running maximum
    mass = torch.zeros_like(top)
    for a in range(0, s, BLOCK):
        b = min(a + BLOCK, s)
        score = rows @ k[:, a:b].to(exact).transpose(1, 2)  # [K, G*N, B]
        if softcap > 0:
            score = softcap * torch.tanh(score / softcap)
        if mask is not None:
            hidden = ~fold(mask[..., a:b], kv, h // kv)
            score = score.masked_fill(hidden, -torch.inf)
        new = torch.maximum(top, score.amax(-1))
        safe = new.masked_fill(new == -torch.inf, 0.0)  # exp(-inf - -inf) would be NaN
        score = torch.exp(score - safe.unsqueeze(-1))
        shrink = torch.exp(top - safe)
        acc = acc * shrink.unsqueeze(-1) + score @ v[:, a:b].to(exact)
        mass = mass * shrink + score.sum(-1)
        top = new
    out = acc / mass.clamp_min(torch.finfo(exact).tiny).unsqueeze(-1)
    lse = mass.log() + top.masked_fill(top == -torch.inf, 0.0)
    return out.view(h, n, -1), lse.view(h, n)


def within(lengths: Sequence[int], n: int, device: torch.device, upto: Tensor | None = None) -> Tensor:
    """Return the mask [K, N, S] of n rows if KV head j has the first lengths[j] of S slots, or [N, S] for one length;
    row i sees slots before upto[i]."""
    ends = torch.tensor(lengths, device=device).view(-1, 1, 1)
    ends = ends if upto is None else torch.minimum(ends, upto.view(1, -1, 1))
    mask = (torch.arange(max(lengths), device=device) < ends).expand(-1, n, -1)
    return mask[0] if len(lengths) == 1 else mask


def fold(mask: Tensor, kv: int, group: int) -> Tensor:
    """Fold [N, S] or [K, N, S] -> [K or 1, G*N, S]: the mask of rows that include the query heads of a group."""
    if mask.dim() == 2:
        return mask.repeat(group, 1).unsqueeze(0)
    return mask.unsqueeze(1).expand(-1, group, -1, -1).reshape(kv, -1, mask.shape[-1])
