"""Attention mass per slot in plain PyTorch: the specification of `attention_mass`.

Two passes over blocks of slots: the first computes each row's log-sum-exp, the second the masses, which are reduced
over rows at once. One block of scores exists at a time, in a buffer that all blocks share, because malloc would hold
several separate blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 256  # queries at a time
SCORES = 1 << 20  # scores at a time: 4 MiB in float32


def attention_mass(
    q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, scale: float, softcap: float, window: int | None, over: str
) -> Tensor:
    (h, w, d), (kv, s) = q.shape, pos.shape
    g = h // kv
    exact = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    out = torch.zeros((kv, g, w, s) if over == "none" else (kv, s), dtype=exact, device=k.device)
    block = max(1, min(s, SCORES // max(1, h * min(ROWS, w))))
    room = torch.empty(h * min(ROWS, w) * block, dtype=exact, device=k.device)
    for first in range(0, w, ROWS):
        at = q_pos[first : first + ROWS].view(1, 1, -1, 1)
        rows = q[:, first : first + ROWS].to(exact).reshape(kv, -1, d) * scale  # [K, G*R, D]
        spans = [slice(a, min(a + block, s)) for a in range(0, s, block)]

        def scores(span: slice, at: Tensor = at, rows: Tensor = rows) -> Tensor:
            return _scores(rows, at, k[:, span].to(exact), pos[:, span], softcap, window, room)

        top = torch.full((kv, g, at.shape[2], 1), -torch.inf, dtype=exact, device=k.device)
        total = torch.zeros_like(top)
        for span in spans:
            one = scores(span)
            higher = torch.maximum(top, one.amax(-1, keepdim=True))
            base = higher.masked_fill(higher == -torch.inf, 0.0)  # a row that sees no slot has no mass
            total = total * torch.exp(top - base) + one.sub_(base).exp_().sum(-1, keepdim=True)
            top = higher
        if len(spans) == 1:  # the only block is still in the buffer
            _fold(out, one.div_(total.masked_fill_(total == 0, 1.0)), first, over)
            continue
        lse = (top + total.log()).masked_fill_(top == -torch.inf, 0.0)
        for span in spans:
            _fold(out[..., span], scores(span).sub_(lse).exp_(), first, over)
    return out.div_(w) if over == "mean" and w else out


def _scores(
    rows: Tensor, at: Tensor, k: Tensor, pos: Tensor, softcap: float, window: int | None, room: Tensor
) -> Tensor:
    """Return [K, G, R, B] in `room`: scaled scores, -inf for slots that a row does not see."""
    kv, n = pos.shape
    score = room[: kv * rows.shape[1] * n].view(kv, rows.shape[1], n)
    torch.bmm(rows, k.transpose(1, 2), out=score)
    score = score.view(kv, -1, at.shape[2], n)
    if softcap > 0:
        score.div_(softcap).tanh_().mul_(softcap)
    slot = pos.view(kv, 1, 1, n)
    hidden = (slot < 0) | (slot > at)
    if window is not None:
        hidden |= slot <= at - window
    return score.masked_fill_(hidden, -torch.inf)


def _fold(into: Tensor, mass: Tensor, first: int, over: str) -> None:
    """Reduce a block's masses [K, G, R, B] as `over` requests, and add the result to its slots."""
    if over == "none":
        into[:, :, first : first + mass.shape[2]] = mass
    elif over == "max":
        torch.maximum(into, mass.amax((1, 2)), out=into)
    else:
        into += mass.sum(2).mean(1)
