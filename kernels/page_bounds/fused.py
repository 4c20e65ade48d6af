"""Bounds of pages in Triton, channel by channel as in the reference; a program loads its pages once for all rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAGES = 16  # per program
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


def page_bounds(rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Bound rows [K, R, D], low, high [K, P, D] -> [K, R, P] float32."""
    (kv, r, d), p = rows.shape, low.shape[1]
    out = torch.empty(kv, r, p, dtype=torch.float32, device=rows.device)
    if out.numel():
        bounds_kernel[(triton.cdiv(p, PAGES), kv)](
            rows.contiguous(), low.contiguous(), high.contiguous(), out, r, p,
            D=d, X=PAGES, Y=triton.next_power_of_2(d), **OPTIONS,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n_rows", "n_pages"])  # or Triton would compile another kernel for one row
def bounds_kernel(p_row, p_low, p_high, p_out, n_rows, n_pages, D: tl.constexpr, X: tl.constexpr, Y: tl.constexpr):
    """Bound pages for all rows; grid (blocks of X pages, K)."""
    head = tl.program_id(1).to(tl.int64)
    page, i_dim = tl.program_id(0) * X + tl.arange(0, X), tl.arange(0, Y)
    there, in_key = page < n_pages, i_dim < D
    i = (head * n_pages + page)[:, None] * D + i_dim[None, :]
    mask = there[:, None] & in_key[None, :]
    low = tl.load(p_low + i, mask=mask, other=0.0).to(tl.float32)  # [X, Y]
    high = tl.load(p_high + i, mask=mask, other=0.0).to(tl.float32)
    for n in range(0, n_rows):
        row = head * n_rows + n
        q = tl.load(p_row + row * D + i_dim, mask=in_key, other=0.0).to(tl.float32)[None, :]
        tl.store(p_out + row * n_pages + page, tl.sum(tl.maximum(q * low, q * high), 1), mask=there)
