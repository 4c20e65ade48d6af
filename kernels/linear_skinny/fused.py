"""Batch-invariant linear layers for few rows, in Triton.

The inputs of an output are summed in steps of 128 (64 for groups of 32), one after another within each of SK fixed
ranges; the SK sums are added in order. SK depends on the weight's shape and the GPU, never on the number of rows. Rows
are padded to a tile of 16 or 32, both of which use the same instructions. A tile of 64 would use others on Hopper.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.linear_skinny import ptx
from kvcli.kernels.linear_skinny.reference import Weight

BN = 64  # outputs per program of `linear_kernel`
LEAST = 4  # fewest steps of a range, so that loads overlap
BLOCK = 256  # outputs per program of `add_kernel`
GROUPS = 8  # groups per program of `sums_kernel`
# Triton releases differ in fusing a product and a sum. It is off here, and tl.fma is used where it is meant.
OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}

INT4_BF16, INT4_FP16 = tl.constexpr(ptx.int4(torch.bfloat16)), tl.constexpr(ptx.int4(torch.float16))
NF4_BF16, NF4_FP16 = tl.constexpr(ptx.nf4(torch.bfloat16)), tl.constexpr(ptx.nf4(torch.float16))
CONSTRAINTS = tl.constexpr(ptx.CONSTRAINTS)


def linear(x: Tensor, w: Weight, bias: Tensor | None, sk: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """Compute x [M, K] -> [M, N]. `sk`: ranges, 0 = chosen for the GPU; `dtype`: of the result, None = that of x."""
    m, (n, k) = x.shape[0], w.shape
    sk = sk or stretches(n, k, w.step, _processors(x.device))
    y = x.new_empty(m, n, dtype=dtype)
    parts = y if sk == 1 else x.new_empty(sk, m, n, dtype=torch.float32)
    sums = _sums(x, w.group) if w.kind == "int4" else x
    tile = 16 if m <= 16 else 32
    linear_kernel[(triton.cdiv(n, BN), sk, triton.cdiv(m, tile))](
        x, w.data, _scales(w, x), sums, _book(x.device, x.dtype), _or(bias, x), parts, m, n,
        K=k, GROUP=w.group, BM=tile, BN=BN, BK=w.step, SK=sk, KIND=w.kind,
        HAS_BIAS=bias is not None and sk == 1, PTX=x.is_cuda, **OPTIONS,
    )  # fmt: skip
    if sk > 1:
        add_kernel[(triton.cdiv(n, BLOCK), m)](
            parts, _or(bias, x), y, m, n, SK=sk, BLOCK=BLOCK, HAS_BIAS=bias is not None, **OPTIONS
        )
    return y


def widen(w: Weight, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Dequantize outputs `first` to `last` of a weight, [last - first, K]; for int8 return the codes alone."""
    n, k = w.shape
    if w.kind == "int8":
        return w.data[first:last].to(dtype)
    y = torch.empty(last - first, k, dtype=dtype, device=w.data.device)
    grid = (triton.cdiv(last - first, BN), triton.cdiv(k, w.step))
    widen_kernel[grid](
        w.data, _scales(w, y), _book(y.device, dtype), y, first, last, n,
        K=k, GROUP=w.group, BN=BN, BK=w.step, KIND=w.kind, PTX=y.is_cuda, **OPTIONS,
    )  # fmt: skip
    return y


def stretches(n: int, k: int, step: int, processors: int) -> int:
    """Return the number of ranges for a weight's inputs: two programs per multiprocessor, if there are enough steps."""
    programs, steps, sk = triton.cdiv(n, BN), triton.cdiv(k, step), 1
    while sk * programs < 2 * processors and steps >= 2 * sk * LEAST:
        sk *= 2
    return sk


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _book(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(ptx.NF4, dtype=dtype, device=device)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return a valid pointer where a kernel's argument is not read."""
    return other if tensor is None else tensor


def _scales(w: Weight, other: Tensor) -> Tensor:
    """Return the scales; pairs are viewed as one word each."""
    return other if w.scale is None else w.scale if w.kind == "int8" else w.scale.view(torch.int32)


def _sums(x: Tensor, group: int) -> Tensor:
    """Sum the inputs of each group, [K // group, M] float32. A group's zero is multiplied with this sum."""
    m, k = x.shape
    sums = x.new_empty(k // group, m, dtype=torch.float32)
    sums_kernel[(m, triton.cdiv(k // group, GROUPS))](x, sums, m, K=k, GROUP=group, GROUPS=GROUPS, **OPTIONS)
    return sums


# ---- on the GPU ----


@triton.jit(do_not_specialize=["M"])  # or Triton would compile another kernel for one row
def linear_kernel(
    p_x, p_w, p_scale, p_sums, p_book, p_bias, p_y, M, N,
    K: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SK: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute BM rows and BN outputs of the result, or of one range, [SK, M, N]; grid (N / BN, SK, M / BM)."""
    i_n = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    i_m = tl.program_id(2) * BM + tl.arange(0, BM)
    m_m, m_n = i_m < M, i_n < N
    STEPS: tl.constexpr = (K + BK - 1) // BK
    HALF: tl.constexpr = BK // 2
    PAIR: tl.constexpr = tl.float16 if KIND == "nf4" else p_x.dtype.element_ty
    b_y = tl.zeros([BM, BN], tl.float32)
    for step in range(part * STEPS // SK, (part + 1) * STEPS // SK):
        if KIND == "plain" or KIND == "int8":
            i_k = step * BK + tl.arange(0, BK)
            b_x = _inputs(p_x, i_m, i_k, m_m, K, K % BK != 0)  # [BM, BK]
            m_w = m_n[None, :] & (i_k < K)[:, None] if K % BK != 0 else m_n[None, :]
            b_w = tl.load(p_w + i_n[None, :].to(tl.int64) * K + i_k[:, None], mask=m_w, other=0)  # [BK, BN]
            if KIND == "int8":
                b_w = b_w.to(tl.float32).to(b_x.dtype)  # exact
            b_y = tl.dot(b_x, b_w, b_y)
        else:
            i_k = step * BK + tl.arange(0, HALF)
            b_low = _inputs(p_x, i_m, i_k, m_m, K, K % BK != 0)  # [BM, HALF]
            b_high = _inputs(p_x, i_m, HALF + i_k, m_m, K, K % BK != 0)
            b_v, b_w = _halves(p_w, p_book, i_n, m_n, step, STEPS, b_low.dtype, BK, KIND, PTX)  # [HALF, BN]
            if KIND == "nf4":
                b_s, b_t = _pairs(p_scale, step, i_n, m_n, N, PAIR)  # [BN]
                b_y = _scaled(tl.dot(b_low, b_v), b_s, b_y)
                b_y = _scaled(tl.dot(b_high, b_w), b_t, b_y)
            elif GROUP == BK:
                b_s, b_z = _pairs(p_scale, step, i_n, m_n, N, PAIR)
                b_y = _scaled(tl.dot(b_high, b_w, tl.dot(b_low, b_v)), b_s, b_y)
                b_y = _zeros(p_sums, step, i_m, m_m, M, b_z, b_y)
            else:
                b_s, b_z = _pairs(p_scale, 2 * step, i_n, m_n, N, PAIR)
                b_y = _scaled(tl.dot(b_low, b_v), b_s, b_y)
                b_y = _zeros(p_sums, 2 * step, i_m, m_m, M, b_z, b_y)
                # if the last step has only a first half, the second half is multiplied with 0
                group = tl.minimum(2 * step + 1, K // GROUP - 1)
                b_s, b_z = _pairs(p_scale, group, i_n, m_n, N, PAIR)
                b_y = _scaled(tl.dot(b_high, b_w), b_s, b_y)
                b_y = _zeros(p_sums, group, i_m, m_m & (2 * step + 1 < K // GROUP), M, b_z, b_y)
    if KIND == "int8":
        b_y *= tl.load(p_scale + i_n, mask=m_n, other=0)[None, :].to(tl.float32)
    if HAS_BIAS:
        b_y += tl.load(p_bias + i_n, mask=m_n, other=0)[None, :].to(tl.float32)
    p_out = p_y + (part * M + i_m)[:, None].to(tl.int64) * N + i_n[None, :]
    tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def _inputs(p_x, i_m, i_k, m_m, K: tl.constexpr, IS_RAGGED: tl.constexpr):
    """Load rows of the input, [BM, len(i_k)]; 0 out of bounds."""
    m_x = m_m[:, None] & (i_k < K)[None, :] if IS_RAGGED else m_m[:, None]
    return tl.load(p_x + i_m[:, None] * K + i_k[None, :], mask=m_x, other=0.0)


@triton.jit
def _halves(
    p_w, p_book, i_n, m_n, step, STEPS: tl.constexpr, dtype: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Return the numbers of a step's codes, [BK / 2, BN] each, without their scales."""
    i_b = step * (BK // 2) + tl.arange(0, BK // 2)
    p_byte = p_w + i_n[None, :].to(tl.int64) * (STEPS * BK // 2) + i_b[:, None]
    b_w = tl.load(p_byte, mask=m_n[None, :], other=0)  # [BK / 2, BN] uint8
    if PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            INT4_BF16 if KIND == "int4" else NF4_BF16, CONSTRAINTS, [b_w],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    elif PTX:
        return tl.inline_asm_elementwise(
            INT4_FP16 if KIND == "int4" else NF4_FP16, CONSTRAINTS, [b_w],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    elif KIND == "int4":
        return ((b_w & 15).to(tl.float32) - 8.0).to(dtype), ((b_w >> 4).to(tl.float32) - 8.0).to(dtype)
    else:
        return tl.load(p_book + (b_w & 15)), tl.load(p_book + (b_w >> 4))


@triton.jit
def _pairs(p_scale, row, i_n, m_n, N, dtype: tl.constexpr):
    """Load two numbers per output, [BN] float32 each, from one word: loads of two bytes take as long as wide ones."""
    b_pair = tl.load(p_scale + row * N + i_n, mask=m_n, other=0)  # [BN] int32
    b_first = b_pair.to(tl.int16).to(dtype, bitcast=True)
    return b_first.to(tl.float32), (b_pair >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _scaled(b_found, b_s, b_y):
    """[BM, BN] += [BM, BN] * [BN]"""
    return tl.fma(b_found, tl.broadcast_to(b_s[None, :], b_y.shape), b_y)


@triton.jit
def _zeros(p_sums, group, i_m, m_m, M, b_z, b_y):
    """[BM, BN] += sums of inputs [BM] * zeros [BN]"""
    b_sum = tl.load(p_sums + group * M + i_m, mask=m_m, other=0.0)  # [BM]
    return tl.fma(tl.broadcast_to(b_sum[:, None], b_y.shape), tl.broadcast_to(b_z[None, :], b_y.shape), b_y)


@triton.jit(do_not_specialize=["M"])
def sums_kernel(p_x, p_sums, M, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Sum some groups of one row; grid (M, K / GROUP / GROUPS). With several rows the order would depend on M."""
    row = tl.program_id(0)
    i_g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    i_k = i_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    b_x = tl.load(p_x + row * K + i_k, mask=(i_g < K // GROUP)[:, None], other=0.0).to(tl.float32)  # [GROUPS, GROUP]
    tl.store(p_sums + i_g * M + row, tl.sum(b_x, 1), mask=i_g < K // GROUP)


@triton.jit(do_not_specialize=["M"])
def add_kernel(p_parts, p_bias, p_y, M, N, SK: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Add the ranges [SK, M, N] in order, and the bias; grid (N / BLOCK, M)."""
    i_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, m_n = tl.program_id(1).to(tl.int64), i_n < N
    b_y = tl.load(p_parts + row * N + i_n, mask=m_n, other=0.0)  # [BLOCK]
    for part in tl.static_range(1, SK):
        b_y += tl.load(p_parts + (part * M + row) * N + i_n, mask=m_n, other=0.0)
    if HAS_BIAS:
        b_y += tl.load(p_bias + i_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(p_y + row * N + i_n, b_y.to(p_y.dtype.element_ty), mask=m_n)


@triton.jit(do_not_specialize=["last"])
def widen_kernel(
    p_w, p_scale, p_book, p_y, first, last, N,
    K: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Dequantize a step of BN outputs from `first` on, to [last - first, K]; grid (outputs / BN, K / BK)."""
    i_n, step = first + tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1)
    m_n = i_n < last
    STEPS: tl.constexpr = (K + BK - 1) // BK
    HALF: tl.constexpr = BK // 2
    dtype: tl.constexpr = p_y.dtype.element_ty
    PAIR: tl.constexpr = tl.float16 if KIND == "nf4" else dtype
    b_v, b_w = _halves(p_w, p_book, i_n, m_n, step, STEPS, dtype, BK, KIND, PTX)  # [HALF, BN]
    i_k = step * BK + tl.arange(0, HALF)
    p_out = p_y + (i_n - first)[None, :].to(tl.int64) * K
    if KIND == "nf4":
        b_s, b_t = _pairs(p_scale, step, i_n, m_n, N, PAIR)  # [BN]
        tl.store(p_out + i_k[:, None], (b_v * b_s[None, :]).to(dtype), mask=m_n[None, :] & (i_k < K)[:, None])
        i_k += HALF
        tl.store(p_out + i_k[:, None], (b_w * b_t[None, :]).to(dtype), mask=m_n[None, :] & (i_k < K)[:, None])
    else:
        b_s, b_z = _pairs(p_scale, step * BK // GROUP, i_n, m_n, N, PAIR)
        b_v = b_v * b_s[None, :] + b_z[None, :]
        tl.store(p_out + i_k[:, None], b_v.to(dtype), mask=m_n[None, :] & (i_k < K)[:, None])
        i_k += HALF
        b_s, b_z = _pairs(p_scale, tl.minimum((step * BK + HALF) // GROUP, K // GROUP - 1), i_n, m_n, N, PAIR)
        b_w = b_w * b_s[None, :] + b_z[None, :]
        tl.store(p_out + i_k[:, None], b_w.to(dtype), mask=m_n[None, :] & (i_k < K)[:, None])
