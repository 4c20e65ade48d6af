"""Attention of rows over slots on CPU: two products and a softmax for few rows over many slots, else a flash kernel.

Measured on one thread, 4 KV heads of 64 with 4 query heads each (docs/measurements/lab-log.md): at 16k slots the
products take half the time of the flash kernel for 1 row and two thirds for 8, because that kernel multiplies in
small pieces. At 512 slots the flash kernel is faster, because it is a single call. The products need a contiguous
buffer (a batched product copies anything else), and in 16 bits they round scores as transformers' eager attention
does. On a CPU that does not multiply bf16 they take 3 to 30 times as long as the flash kernel, at any length. KV
heads of different lengths share the products, and each head's spare capacity is masked. For many rows each head is
computed by itself, because a mask of rows and slots would be larger than the slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcli.kernels.attend.reference import fold, within
from kvcli.kernels.invariant_activations import multiplies

FEW = 64  # rows times query heads per KV head; with more, the flash kernel is faster
MANY = 1024  # slots; with fewer, the products' ten calls take longer than the flash kernel
LOG2E = 1.4426950408889634


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, mask: Tensor | None, length: int | Sequence[int]
) -> tuple[Tensor, Tensor]:
    assert not softcap, "soft-capped scores are the reference's"
    h, n, _ = q.shape
    ends = [length] if isinstance(length, int) else length
    longest, is_few = max(ends), h // k.shape[0] * n <= FEW
    if longest == 0:
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.new_zeros(h, n, v.shape[2]), torch.full((h, n), -torch.inf, dtype=wide, device=q.device)
    can = k.is_contiguous() and v.is_contiguous() and multiplies(q.dtype)
    if can and mask is None and is_few and longest >= MANY and min(ends) > 0:
        return _products(q, k, v, scale, ends)
    if len(ends) > 1:
        if not is_few:
            return _head_by_head(q, k, v, scale, ends)
        mask = within(ends, n, q.device)
    return flash(q, k[:, :longest], v[:, :longest], scale, mask)


def _head_by_head(q: Tensor, k: Tensor, v: Tensor, scale: float, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    rows = q.unflatten(0, (k.shape[0], -1))  # [K, G, N, D]
    found = [attend(rows[j], k[j : j + 1], v[j : j + 1], scale, 0.0, None, end) for j, end in enumerate(ends)]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def _products(q: Tensor, k: Tensor, v: Tensor, scale: float, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    h, n, d = q.shape
    kv = k.shape[0]
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = q.reshape(kv, (h // kv) * n, d)
    # base 2 from here on, because exp2 is three times as fast as exp
    if q.dtype == torch.float16:  # scaled before the product, because a score beyond 65,504 would be infinite
        score = torch.bmm(rows * scale, k.transpose(1, 2)).to(wide).mul_(LOG2E)
    else:
        score = torch.bmm(rows, k.transpose(1, 2)).to(wide).mul_(scale * LOG2E)  # [K, G*N, cap]
    for j, end in enumerate(ends):  # one length for all, or one per KV head
        (score if len(ends) == 1 else score[j])[..., end:] = -torch.inf
    top = score.amax(-1, keepdim=True)
    score = score.sub_(top).exp2_()
    mass = score.sum(-1, keepdim=True)
    out = torch.bmm(score.to(v.dtype), v).to(wide).div_(mass)
    lse = mass.log2_().add_(top).div_(LOG2E)
    return out.view(h, n, -1), lse.view(h, n)


def square(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Call torch's kernel, which needs keys and values of one size: the smaller ones are padded with zeros."""
    d, d_v = k.shape[3], v.shape[3]
    if d != d_v:
        q, k = (pad(t, (0, max(d, d_v) - d)) for t in (q, k))
        v = pad(v, (0, max(d, d_v) - d_v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return out[..., :d_v], lse


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Call torch's flash kernel with the query heads of a group as rows; it never stores all scores at once."""
    h, n, d = q.shape
    kv = k.shape[0]
    rows = q.reshape(1, kv, (h // kv) * n, d)
    bias = None
    if mask is not None:
        shown = fold(mask, kv, h // kv)  # [K or 1, G*N, S]
        bias = torch.zeros(shown.shape, dtype=q.dtype, device=q.device).masked_fill_(~shown, -torch.inf).unsqueeze(0)
    out, lse = square(rows, k.unsqueeze(0), v.unsqueeze(0), scale, is_causal=False, bias=bias)
    out, lse = out[0].reshape(h, n, -1), lse[0].reshape(h, n)
    if mask is not None:
        blind = ~fold(mask.any(-1, keepdim=True), kv, h // kv).expand(kv, -1, 1).reshape(h, n)
        out = out.masked_fill(blind.unsqueeze(-1), 0.0)
        lse = lse.masked_fill(blind, -torch.inf)
    return out, lse
