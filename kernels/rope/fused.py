"""Rotate and un-rotate keys in Triton, in one pass, equal to the reference up to the last bit of cosine and sine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SLOTS = 8  # per program; twice as many run out of registers on Hopper
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


def turned(k: Tensor, pos: Tensor, inv_freq: Tensor, scaling: float, interleaved: bool, *, back: bool) -> Tensor:
    """Rotate, or with `back` un-rotate, k [..., S, D] by pos [S] or [..., S], or a shape that broadcasts to it."""
    out = torch.empty_like(k, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    s, d = k.shape[-2:]
    at = pos.expand(k.shape[:-1]).reshape(-1, s).contiguous()
    rotate_kernel[(triton.cdiv(s, SLOTS), at.shape[0])](
        k.contiguous(), at, inv_freq.float(), out, scaling, s, R=inv_freq.shape[0], D=d, X=SLOTS,
        P=triton.next_power_of_2(inv_freq.shape[0]), Y=triton.next_power_of_2(d),
        NEAR=interleaved, BACK=back, **OPTIONS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["s"])
def rotate_kernel(
    p_k, p_pos, p_freq, p_out, scaling, s, R: tl.constexpr, D: tl.constexpr, X: tl.constexpr, P: tl.constexpr,
    Y: tl.constexpr, NEAR: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotate slots of a head; grid (blocks of X slots, heads). NEAR: channels 2 c, 2 c + 1 pair, else c, c + R."""
    i_slot = tl.program_id(0) * X + tl.arange(0, X)
    there = i_slot < s
    row = tl.program_id(1).to(tl.int64) * s + i_slot
    i_pair, i_dim = tl.arange(0, P), tl.arange(0, Y)
    pos = tl.load(p_pos + row, mask=there, other=0).to(tl.float32)
    angle = pos[:, None] * tl.load(p_freq + i_pair, mask=i_pair < R, other=0.0)[None, :]  # [X, P]
    cos, sin = tl.cos(angle) * scaling, tl.sin(angle) * scaling
    if BACK:
        size = cos * cos + sin * sin
        cos, sin = tl.div_rn(cos, size), -tl.div_rn(sin, size)
    first = row[:, None] * D + (i_pair * 2 if NEAR else i_pair)[None, :]
    second = first + (1 if NEAR else R)
    mask = there[:, None] & (i_pair < R)[None, :]
    a, b = tl.load(p_k + first, mask=mask, other=0.0), tl.load(p_k + second, mask=mask, other=0.0)  # [X, P]
    x, y = a.to(tl.float32), b.to(tl.float32)
    tl.store(p_out + first, (x * cos - y * sin).to(a.dtype), mask=mask)
    tl.store(p_out + second, (y * cos + x * sin).to(a.dtype), mask=mask)
    if 2 * R < D:  # channels without rotation
        i = row[:, None] * D + i_dim[None, :]
        pass_by = there[:, None] & ((i_dim >= 2 * R) & (i_dim < D))[None, :]
        tl.store(p_out + i, tl.load(p_k + i, mask=pass_by, other=0.0), mask=pass_by)
