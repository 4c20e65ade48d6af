"""Rows over slots by torch's CPU flash kernel, which returns the log-sum-exp and keeps scores in float32.

Chosen by measurement against two products and a softmax (docs/lab-log.md): about level in time at 4k and 16k slots,
faster at 512, exact softmax in 16-bit, and no copy when the slab has spare capacity, which a batched product makes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.attend.reference import fold


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    h, n, d = q.shape
    kv, s = k.shape[0], k.shape[1]
    if s == 0:
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.new_zeros(h, n, v.shape[2]), torch.full((h, n), -torch.inf, dtype=wide, device=q.device)
    rows = q.reshape(1, kv, (h // kv) * n, d)
    bias = None
    if mask is not None:
        shown = fold(mask, kv, h // kv)  # [K or 1, G*N, S]
        bias = torch.zeros(shown.shape, dtype=q.dtype, device=q.device).masked_fill_(~shown, -torch.inf).unsqueeze(0)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, k.unsqueeze(0), v.unsqueeze(0), 0.0, False, attn_mask=bias, scale=scale
    )
    out, lse = out[0].reshape(h, n, -1), lse[0].reshape(h, n)
    if mask is not None:
        blind = ~fold(mask.any(-1, keepdim=True), kv, h // kv).expand(kv, -1, 1).reshape(h, n)
        out = out.masked_fill(blind.unsqueeze(-1), 0.0)
        lse = lse.masked_fill(blind, -torch.inf)
    return out, lse
