"""Softmax mass per slot in plain PyTorch: the specification of `column_mass`.

Two passes over blocks of slots: the first finds each row's log-sum-exp, the second the masses, which are folded over
rows at once. What exists at a time is one block of scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 256  # queries at a time
SCORES = 1 << 22  # scores at a time: 16 MiB in float32


def column_mass(
    q: Tensor,
    q_pos: Tensor,
    k: Tensor,
    pos: Tensor,
    scale: float,
    softcap: float,
    window: int | None,
    over: str,
) -> Tensor:
    (h, w, d), (kv, s) = q.shape, pos.shape
    g = h // kv
    exact = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    out = torch.zeros((kv, g, w, s) if over == "none" else (kv, s), dtype=exact, device=k.device)
    for first in range(0, w, ROWS):
        at = q_pos[first : first + ROWS].view(1, 1, -1, 1)
        rows = q[:, first : first + ROWS].to(exact).reshape(kv, -1, d) * scale  # [K, G*R, D]
        block = max(1, SCORES // (kv * rows.shape[1]))
        spans = [slice(a, min(a + block, s)) for a in range(0, s, block)]
        lse = torch.full((kv, g, at.shape[2]), -torch.inf, dtype=exact, device=k.device)
        one = None
        for span in spans:
            one = _scores(rows, at, k[:, span].to(exact), pos[:, span], softcap, window)
            lse = torch.logaddexp(lse, torch.logsumexp(one, -1))
        top = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)  # a row that sees nothing has no mass
        for span in spans:
            if len(spans) > 1 or one is None:
                one = _scores(rows, at, k[:, span].to(exact), pos[:, span], softcap, window)
            _fold(out[..., span], torch.exp(one - top), first, over)
    return out.div_(w) if over == "mean" and w else out


def _scores(rows: Tensor, at: Tensor, k: Tensor, pos: Tensor, softcap: float, window: int | None) -> Tensor:
    """[K, G, R, B]: scaled scores, -inf where a row does not see."""
    kv, n = pos.shape
    score = (rows @ k.transpose(1, 2)).view(kv, -1, at.shape[2], n)
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    slot = pos.view(kv, 1, 1, n)
    hidden = (slot < 0) | (slot > at)
    if window is not None:
        hidden |= slot <= at - window
    return score.masked_fill_(hidden, -torch.inf)


def _fold(into: Tensor, mass: Tensor, first: int, over: str) -> None:
    """Add a block's masses [K, G, R, B] to what is asked for of its slots."""
    if over == "none":
        into[:, :, first : first + mass.shape[2]] = mass
    elif over == "max":
        torch.maximum(into, mass.amax((1, 2)), out=into)
    else:
        into += mass.sum(2).mean(1)
