"""Merge partial results in Triton: one program per row and query head, always from the first part to the last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["p_rows", "n_rows", "n_parts", "lse_head", "lse_row"])
def merge_kernel(
    p_outs,  # [H, N, P, E] float32; not read where lse is -inf
    p_lses,  # [H, N, P] float32
    p_rows,  # [N] int32: < 0 = this row is not written; or None
    p_sink,  # [H] float32, or None
    p_out,
    p_lse,
    n_rows,
    n_parts,
    out_head,
    out_row,
    lse_head,
    lse_row,
    E: tl.constexpr,
    EP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merge parts; grid (N, H). AT_ONCE parts are added at a time, in order: a part of lse -inf changes no bit."""
    n, h = tl.program_id(0), tl.program_id(1)
    if p_rows is not None:  # noqa: SIM102  # None removes the condition when the kernel is compiled
        if tl.load(p_rows + n) < 0:
            return
    row = (h * n_rows + n).to(tl.int64) * n_parts
    i, e = tl.arange(0, AT_ONCE), tl.arange(0, EP)
    top = float("-inf")
    if p_sink is not None:
        sink = tl.load(p_sink + h)
        top = sink
    for a in range(0, n_parts, AT_ONCE):
        lse = tl.load(p_lses + row + a + i, mask=a + i < n_parts, other=float("-inf"))  # [AT_ONCE]
        top = tl.maximum(top, tl.max(lse, 0))
    top = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros([EP], tl.float32)
    mass = 0.0
    for a in range(0, n_parts, AT_ONCE):
        lse = tl.load(p_lses + row + a + i, mask=a + i < n_parts, other=float("-inf"))  # [AT_ONCE]
        weight = tl.exp2((lse - top) * LOG2E)
        m_read = (weight > 0)[:, None] & (e < E)[None, :]
        part = tl.load(p_outs + (row + a + i)[:, None] * E + e[None, :], mask=m_read, other=0.0)  # [AT_ONCE, EP]
        acc += tl.sum(part * weight[:, None], 0)
        mass += tl.sum(weight, 0)
    if p_sink is not None:
        mass += tl.exp2((sink - top) * LOG2E)
    some = tl.where(mass > 0, mass, 1.0)
    lse = tl.where(mass > 0, top + tl.log2(some) * LN2, float("-inf"))
    tl.store(p_out + h * out_head + n.to(tl.int64) * out_row + e, (acc / some).to(p_out.dtype.element_ty), mask=e < E)
    tl.store(p_lse + h * lse_head + n.to(tl.int64) * lse_row, lse)


def fold(
    outs: Tensor,
    lses: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    sink: Tensor | None = None,
    rows: Tensor | None = None,
    at_once: int = 1,
) -> None:
    """Merge outs [H, N, P, E] and lses [H, N, P], contiguous -> `out` [N, H, E] and `lse` [N, H], in place.

    `sink` [H] float32: attention sink logits, which add mass and no value. `rows` [N] int32: rows below 0 are not
    written.
    """
    h, n, parts, e = outs.shape
    strides = out.stride(1), out.stride(0), lse.stride(1), lse.stride(0)
    consts = {"E": e, "EP": max(16, triton.next_power_of_2(e)), "AT_ONCE": at_once}
    args = outs, lses, rows, sink, out, lse, n, parts, *strides
    merge_kernel[(n, h)](*args, **consts, num_warps=4, enable_fp_fusion=False)


def merge_attention(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, sink: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Merge [H, N, E] and [H, N] each -> out [H, N, E] of this dtype and lse [H, N], both views of [N, H, ..].

    Parts are added from the first to the last, for any number: a part without visible slots changes no bit.
    """
    h, n, e = outs[0].shape
    out, lse = outs[0].new_empty(n, h, e, dtype=dtype), lses[0].new_empty(n, h, dtype=torch.float32)
    every = torch.stack([t.float() for t in outs], 2), torch.stack([t.float() for t in lses], 2)
    fold(*every, out, lse, sink=sink)
    return out.transpose(0, 1), lse.T
