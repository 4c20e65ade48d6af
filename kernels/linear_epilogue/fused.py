"""Linear layers with an epilogue, in Triton: one launch for a product and what follows it in a decoder layer.

Each program stores its partial sums and counts itself. The last one to arrive at a block of outputs adds the partial
sums in order and applies the epilogue, so bits do not depend on which program is last. Epilogues take eight rows at a
time, and sums in them are those of neighbours, two at a time: Triton lays out longer sums by the shape of a tile.
"""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.linear_epilogue import Heads, MergedLinear
from kvcli.kernels.linear_skinny import MOST, linear_skinny
from kvcli.kernels.linear_skinny.fused import BN, arguments, part_of
from kvcli.kernels.linear_skinny.reference import BLOCK
from kvcli.kernels.rms_norm.fused import normed

ROWS = tl.constexpr(8)  # of an epilogue at a time, so that its layout is the same for any number of rows
GATED = 128  # outputs of a gated epilogue, from twice as many of the product
OPTIONS = {"num_warps": 2, "num_stages": 1, "enable_fp_fusion": False}


def gated(x: Tensor, product: MergedLinear, activation: str) -> Tensor:
    """Compute x [M, K] -> act(gate) * up [M, N / 2], a multiple of 64, of outputs of gate and then of up."""
    y = x.new_empty(len(x), product.weight.shape[0] // 2)
    _launch(x, product, y, y, GATED, SPAN=y.shape[1], HOW=activation)
    return y


def heads(x: Tensor, product: MergedLinear, of: Heads, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute x [M, K] -> q [M, H, D], k and v [M, 2 K, D]. q and k are normed if heads are, and rotated over the first
    R channels; cos, sin [M, R], contiguous, None = no rotation."""
    m, n = len(x), product.weight.shape[0]
    q, kv = x.new_empty(m, of.n_query, of.d), x.new_empty(m, n // of.d - of.n_query, of.d)
    more: dict[str, Any] = {}
    if of.of_q is not None and of.of_k is not None:
        more = {"p_wq": of.of_q.weight, "p_wk": of.of_k.weight, "eps_q": of.of_q.eps, "eps_k": of.of_k.eps}
        more["HOW"] = of.of_q.form
    more |= {"p_cos": cos, "p_sin": sin, "R": 0 if cos is None else cos.shape[1], "H": of.n_query, "D": of.d}
    _launch(x, product, q, kv, lcm(BLOCK, of.d), SPAN=n, **more)
    return q, kv


# of an epilogue, beside its outputs and its rows
NOTHING = dict.fromkeys(("p_cos", "p_sin", "p_wq", "p_wk")) | dict.fromkeys(("eps_q", "eps_k"), 0.0)


def _launch(x: Tensor, product: MergedLinear, y: Tensor, kv: Tensor, columns: int, **given: Any) -> None:
    """Compute a product and its epilogue, which takes `columns` outputs of each SPAN at a time."""
    w, d = product.weight, given.get("D", 0)
    more = {**NOTHING, "HOW": "", "H": 0, "D": d, "R": 0, **given}
    more |= {"N": w.shape[0], "COLS": columns, "DP": triton.next_power_of_2(d)}
    if len(x) > MOST:
        parts = linear_skinny(x, w, product.bias)
        epilogue_kernel[(triton.cdiv(more["SPAN"], columns), triton.cdiv(len(x), ROWS.value))](
            parts, None, None, y, kv, M=len(x), **more, SK=1, KIND="plain", **{**OPTIONS, "num_warps": 4}
        )
    else:
        grid, tensors, consts = arguments(x, w)
        parts = x.new_empty(consts["SK"], len(x), w.shape[0], dtype=torch.float32)
        product_kernel[grid](*tensors, w.arrivals, parts, product.bias, y, kv, M=len(x), **consts, **more, **OPTIONS)


# ---- on the GPU ----


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    p_x, p_w, p_scale, p_factor, p_book, p_arrivals, p_parts, p_bias, p_y, p_kv, p_cos, p_sin, p_wq, p_wk, eps_q,
    eps_k, M, K: tl.constexpr, STEP: tl.constexpr, BM: tl.constexpr, SK: tl.constexpr, KIND: tl.constexpr,
    ABOVE: tl.constexpr, PTX: tl.constexpr, WIDTH: tl.constexpr, HOW: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, R: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Compute a range of BM rows and 64 outputs; the last program of a block applies the epilogue; the grid of
    `linear_kernel`."""
    b_part = part_of(p_x, p_w, p_scale, p_factor, p_book, M, N, K, STEP, BM, SK, KIND, ABOVE, PTX, WIDTH)  # [64, BM]
    tile, i_n = tl.program_id(2), tl.program_id(0) * BN + tl.arange(0, BN)[:, None]
    i_m = tile * BM + tl.arange(0, BM)
    at = (tl.program_id(1) * M + i_m[None, :]) * N + i_n
    tl.store(p_parts + at, b_part, mask=(i_m[None, :] < M) & (i_n < N))
    tl.debug_barrier()  # all warps have stored
    block = tl.program_id(0) * BN % SPAN // COLS
    programs = (tl.minimum(COLS, SPAN - block * COLS) + BN - 1) // BN * (N // SPAN) * SK
    p_arrived = p_arrivals + tile * tl.num_programs(0) + block
    if tl.atomic_add(p_arrived, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(p_arrived, 0)
        for first in range(tile * BM, tl.minimum(M, tile * BM + BM), ROWS):
            _epilogue(
                p_parts, p_scale, p_bias, p_y, p_kv, p_cos, p_sin, p_wq, p_wk, eps_q, eps_k, block,
                first + tl.arange(0, ROWS), M, SK, KIND, HOW, H, D, DP, R, N, SPAN, COLS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def epilogue_kernel(
    p_parts, p_scale, p_bias, p_y, p_kv, p_cos, p_sin, p_wq, p_wk, eps_q, eps_k, M,
    SK: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to a finished product [M, N]; grid (blocks of outputs, blocks of rows)."""
    _epilogue(
        p_parts, p_scale, p_bias, p_y, p_kv, p_cos, p_sin, p_wq, p_wk, eps_q, eps_k, tl.program_id(0),
        tl.program_id(1) * ROWS + tl.arange(0, ROWS), M, SK, KIND, HOW, H, D, DP, R, N, SPAN, COLS,
    )  # fmt: skip


@triton.jit
def _epilogue(
    p_parts, p_scale, p_bias, p_y, p_kv, p_cos, p_sin, p_wq, p_wk, eps_q, eps_k, block, i_m, M,
    SK: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = p_y.dtype.element_ty
    m_m, rows = (i_m < M)[:, None], i_m.to(tl.int64)[:, None]
    if D > 0:
        for i in tl.static_range(COLS // D):
            _head(
                p_parts, p_scale, p_bias, p_y, p_kv, p_cos, p_sin, p_wq, p_wk, eps_q, eps_k,
                block * (COLS // D) + i, rows, m_m, M, SK, KIND, HOW, H, D, DP, R, N, dtype,
            )  # fmt: skip
    else:
        i_n = block * COLS + tl.arange(0, COLS)
        mask = m_m & (i_n < SPAN)[None, :]
        b_y = _output(p_parts, p_scale, p_bias, rows, i_n, mask, M, N, SK, KIND, dtype)  # [BM, COLS]
        b_y = _activated(b_y, HOW).to(dtype).to(tl.float32)
        b_y *= _output(p_parts, p_scale, p_bias, rows, SPAN + i_n, mask, M, N, SK, KIND, dtype)
        tl.store(p_y + rows * SPAN + i_n[None, :], b_y.to(dtype), mask=mask)


@triton.jit
def _head(
    p_parts, p_scale, p_bias, p_q, p_kv, p_cos, p_sin, p_wq, p_wk, eps_q, eps_k, head, rows, m_m, M,
    SK: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one head of each row, [BM, D]. Channel c of the first R / 2 rotates with c + R / 2."""
    i_d = tl.arange(0, DP)
    i_n = head * D + i_d
    m_x = m_m & ((i_d < D) & (i_n < N))[None, :]
    b_x = _output(p_parts, p_scale, p_bias, rows, i_n, m_x, M, N, SK, KIND, dtype)  # [BM, DP]
    b_y = b_x
    m_turned = ((i_d < R) & (i_n < N))[None, :]
    i_other = tl.where(i_d < R // 2, i_d + R // 2, i_d - R // 2)
    if R > 0:
        b_z = _output(p_parts, p_scale, p_bias, rows, head * D + i_other, m_m & m_turned, M, N, SK, KIND, dtype)
    if p_wq is not None:
        size = tl.rsqrt(_summed(b_x * b_x) / D + tl.where(head < H, eps_q, eps_k))[:, None]
        b_y = _normed(b_x, p_wq, p_wk, head < H, i_d[None, :], (i_d < D)[None, :], size, FORM, dtype)
        if R > 0:
            b_z = _normed(b_z, p_wq, p_wk, head < H, i_other[None, :], m_turned, size, FORM, dtype)
    if R > 0:
        b_cos = tl.load(p_cos + rows * R + i_d[None, :], mask=m_m & m_turned, other=0.0).to(tl.float32)
        b_sin = tl.load(p_sin + rows * R + i_d[None, :], mask=m_m & m_turned, other=0.0).to(tl.float32)
        # rounded where transformers rounds
        b_z = (tl.where((i_d < R // 2)[None, :], -b_z, b_z) * b_sin).to(dtype).to(tl.float32)
        b_y = tl.where(m_turned, (b_y * b_cos).to(dtype).to(tl.float32) + b_z, b_y)
    Q: tl.constexpr = H * D
    b_y = tl.where((i_n < (Q + N) // 2)[None, :], b_y, b_x).to(dtype)  # values are behind queries and keys
    tl.store(p_q + rows * Q + i_n[None, :], b_y, mask=m_x & (i_n < Q)[None, :])
    tl.store(p_kv + rows * (N - Q) + (i_n - Q)[None, :], b_y, mask=m_x & (i_n >= Q)[None, :])


@triton.jit
def _normed(b_x, p_wq, p_wk, is_q, i_d, m_d, size, FORM: tl.constexpr, dtype: tl.constexpr):
    b_q = normed(b_x, p_wq, i_d, m_d, size, FORM, dtype).to(tl.float32)
    return tl.where(is_q, b_q, normed(b_x, p_wk, i_d, m_d, size, FORM, dtype).to(tl.float32))


@triton.jit
def _output(
    p_parts, p_scale, p_bias, rows, i_n, mask, M, N: tl.constexpr, SK: tl.constexpr, KIND: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Add the ranges of outputs `i_n` in order; rounded as the product alone is, in float32."""
    p_part = p_parts + rows * N + i_n[None, :]
    b_y = tl.load(p_part, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    for part in tl.static_range(1, SK):
        b_y += tl.load(p_part + part * M * N, mask=mask, other=0.0, cache_modifier=".cg")
    if KIND == "int8":
        b_y *= tl.load(p_scale + i_n[None, :], mask=mask, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_y += tl.load(p_bias + i_n[None, :], mask=mask, other=0.0).to(tl.float32)
    return b_y.to(dtype).to(tl.float32)


@triton.jit
def _activated(x, HOW: tl.constexpr):
    if HOW == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # gelu_tanh: 1 + tanh(u) = 2 sigmoid(2 u)
        u = x if HOW == "silu" else 1.5957691216057308 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-u))


@triton.jit
def _summed(x):
    """[M, X] -> [M], X a power of two up to 512: neighbours, two at a time."""
    for _ in tl.static_range(9):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)
    return tl.reshape(x, [x.shape[0]])
