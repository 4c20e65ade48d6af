"""Gated delta rule and its convolution in Triton. A program keeps its part of a state in registers, through all rows.

A row has the same bits for any number of rows: rows follow one another in a loop, and one compiled form computes the
outputs of a pass and the state after its accepted rows. What a launch writes is therefore chosen as it runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 16  # values of a head in a program: a state of 128 keys takes 64 registers of each thread of a warp
TIMES, CHANNELS = 16, 64  # of a tile of the convolution


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    is_normed: bool = True,
    is_captured: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute as the reference does."""
    shape = v.shape[1], k.shape[2], v.shape[2]
    before = v.new_zeros(shape, dtype=torch.float32) if state is None else state.float().contiguous()
    out = v.new_empty(v.shape)
    behind = before if is_captured or state is None else torch.empty_like(before)
    _launch((q, k, v, g, beta), before, behind, out, None, is_normed, writes_state=not is_captured, writes_out=True)
    return out, behind


def advance_(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, count: Tensor, *, is_normed: bool = True
) -> None:
    """Update a state [H, Dk, Dv] in place by the first `count` [1] rows; `count` int32 on the device."""
    _launch((q, k, v, g, beta), state, state, v, count, is_normed, writes_state=True, writes_out=False)


def _launch(
    rows: tuple[Tensor, ...], before: Tensor, behind: Tensor, out: Tensor, count: Tensor | None, is_normed: bool,
    *, writes_state: bool, writes_out: bool,
) -> None:  # fmt: skip
    q, k, v = (t if t.stride(2) == 1 and t.stride(1) == t.shape[2] else t.contiguous() for t in rows[:3])
    g, beta = (t.contiguous() for t in rows[3:])
    heads, dk, dv = before.shape
    count, by_count = (before, False) if count is None else (count, True)
    gated_delta_kernel[(heads, triton.cdiv(dv, COLUMNS))](
        *(q, k, v, g, beta, before, behind, out, count.view(torch.int32)),
        *(len(v), int(by_count), int(writes_state), int(writes_out), q.stride(0), k.stride(0), v.stride(0)),
        **{"H": heads, "GROUP": heads // k.shape[1], "DK": dk, "DV": dv, "BK": triton.next_power_of_2(dk)},
        **{"BV": COLUMNS, "ROOT": dk**0.5, "IS_NORMED": is_normed},
        num_warps=1,  # sums over keys stay within a warp
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["n", "by_count", "writes_state", "writes_out"])
def gated_delta_kernel(
    p_q, p_k, p_v,  # rows of contiguous heads: [N, K, DK], [N, K, DK], [N, H, DV]
    p_g, p_beta,  # [N, H]: log decay, float32; beta
    p_before, p_behind,  # [H, DK, DV] float32, which may be one
    p_out,  # [N, H, DV]
    p_count,  # [1] int32
    n, by_count, writes_state, writes_out,
    q_step, k_step, v_step,
    H: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROOT: tl.constexpr, IS_NORMED: tl.constexpr,
):  # fmt: skip
    """Run all rows through the values `BV` of one head; grid (H, DV / BV)."""
    head = tl.program_id(0)
    i_k, i_v = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    m_k, m_v = i_k < DK, i_v < DV
    m_s = m_k[:, None] & m_v[None, :]
    at = (head * DK + i_k).to(tl.int64)[:, None] * DV + i_v[None, :]
    b_s = tl.load(p_before + at, mask=m_s, other=0.0)  # [BK, BV]
    i_q, m_out, i_v = head // GROUP * DK + i_k, i_v < DV * writes_out, head * DV + i_v
    for _ in range(0, tl.minimum(n, tl.load(p_count, mask=by_count != 0, other=n))):
        b_q = tl.load(p_q + i_q, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + i_q, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(p_v + i_v, mask=m_v, other=0.0).to(tl.float32)
        if IS_NORMED:
            b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6)
            b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
        b_s *= tl.exp(tl.load(p_g + head).to(tl.float32))
        b_v -= tl.sum(b_s * b_k[:, None], 0)
        b_v *= tl.load(p_beta + head).to(tl.float32)
        b_s += b_k[:, None] * b_v[None, :]
        b_out = tl.sum(b_s * (b_q / ROOT)[:, None], 0)
        tl.store(p_out + i_v, b_out.to(p_out.dtype.element_ty), mask=m_out)
        p_q, p_k, p_v = p_q + q_step, p_k + k_step, p_v + v_step
        p_g, p_beta, p_out = p_g + H, p_beta + H, p_out + H * DV
    tl.store(p_behind + at, b_s, mask=(i_k < DK * writes_state)[:, None] & m_v[None, :])


def causal_conv(x: Tensor, w: Tensor, bias: Tensor | None, n: int, has_silu: bool) -> Tensor:
    """Convolve x [C, L], w [C, W], bias [C] or None -> [n, C]: the last n positions, each from its last W inputs."""
    x, (c, length) = x.contiguous(), x.shape
    y = x.new_empty(n, c)
    causal_conv_kernel[(triton.cdiv(n, TIMES), triton.cdiv(c, CHANNELS))](
        *(x, w.contiguous(), bias, y, n, length),
        **{"C": c, "W": w.shape[1], "HAS_SILU": has_silu, "BT": TIMES, "BC": CHANNELS},
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y


@triton.jit(do_not_specialize=["n", "length"])
def causal_conv_kernel(
    p_x, p_w, p_bias, p_y,  # [C, L], [C, W], [C] or None, [N, C]
    n, length,
    C: tl.constexpr, W: tl.constexpr, HAS_SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Convolve a tile of channels and positions; grid (N / BT, C / BC). Rounds after the sum, as PyTorch does."""
    i_t, i_c = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BC + tl.arange(0, BC)
    m_t, m_c = i_t < n, i_c < C
    first = length - n - W + 1 + i_t  # of the inputs of a position
    b_y = tl.zeros((BC, BT), tl.float32)
    if p_bias is not None:
        b_y += tl.load(p_bias + i_c, mask=m_c, other=0.0).to(tl.float32)[:, None]
    for j in tl.static_range(W):
        m_x = m_c[:, None] & (m_t & (first + j >= 0))[None, :]
        b_x = tl.load(p_x + i_c.to(tl.int64)[:, None] * length + (first + j)[None, :], mask=m_x, other=0.0)
        b_y += b_x.to(tl.float32) * tl.load(p_w + i_c * W + j, mask=m_c, other=0.0).to(tl.float32)[:, None]
    dtype: tl.constexpr = p_y.dtype.element_ty
    if HAS_SILU:
        b_y = b_y.to(dtype).to(tl.float32)
        b_y = b_y / (1.0 + tl.exp(-b_y))
    tl.store(p_y + i_t.to(tl.int64)[None, :] * C + i_c[:, None], b_y.to(dtype), mask=m_c[:, None] & m_t[None, :])
