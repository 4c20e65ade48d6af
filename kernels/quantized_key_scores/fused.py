"""Scores of quantized keys in Triton: codes are read once and converted before the matrix product.

A float32 row is split into three bfloat16 numbers, 24 bits together, and codes are exact in bfloat16. A score therefore
has float32 precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, SLOTS = 16, 64
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


def code_scores(rows: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Score rows [K, R, D], codes [K, S, D], scale [K, S] -> [K, R, S] float32."""
    (kv, r, d), s = rows.shape, codes.shape[1]
    out = torch.empty(kv, r, s, dtype=torch.float32, device=rows.device)
    if out.numel():
        scores_kernel[(triton.cdiv(s, SLOTS), triton.cdiv(r, ROWS), kv)](
            rows.contiguous(), codes.contiguous(), scale.contiguous(), out, r, s, D=d, M=ROWS, B=SLOTS,
            Y=max(16, triton.next_power_of_2(d)), THREE=rows.dtype != torch.bfloat16, **OPTIONS,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n_rows", "s"])
def scores_kernel(
    p_row, p_code, p_scale, p_out, n_rows, s, D: tl.constexpr, M: tl.constexpr, B: tl.constexpr, Y: tl.constexpr,
    THREE: tl.constexpr,
):  # fmt: skip
    """Score rows; grid (blocks of B slots, blocks of M rows, K). THREE: rows have more than 8 bits."""
    head = tl.program_id(2).to(tl.int64)
    n, i_slot, i_dim = tl.program_id(1) * M + tl.arange(0, M), tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, Y)
    live, there, in_key = n < n_rows, i_slot < s, i_dim < D
    row, slot = head * n_rows + n, head * s + i_slot
    x = tl.load(p_row + row[:, None] * D + i_dim[None, :], mask=live[:, None] & in_key[None, :], other=0.0)  # [M, Y]
    code = tl.load(p_code + slot[:, None] * D + i_dim[None, :], mask=there[:, None] & in_key[None, :], other=0)
    k = tl.trans(code.to(tl.float32).to(tl.bfloat16))  # [Y, B]
    most = x.to(tl.bfloat16)
    score = tl.dot(most, k)
    if THREE:
        left = x.to(tl.float32) - most.to(tl.float32)
        more = left.to(tl.bfloat16)
        score = tl.dot(more, k, score)
        score = tl.dot((left - more.to(tl.float32)).to(tl.bfloat16), k, score)
    scale = tl.load(p_scale + slot, mask=there, other=0.0).to(tl.float32)
    tl.store(p_out + row[:, None] * s + i_slot[None, :], score * scale[None, :], mask=live[:, None] & there[None, :])
