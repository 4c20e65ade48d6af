"""Batch-invariant linear layers for few rows, in Triton: operands go from memory to the matrix units.

The result is computed transposed, y^T [N, M] = W [N, K] x^T [K, M]: 16 outputs of the weight are the first operand of
an instruction, 8 rows the second. A lane's 16 contiguous bytes of a weight are its part of that operand, and 16
contiguous bytes of a row are its part of the second, because the inputs of an instruction are permuted alike in both.
So loops use no shared memory. Warps are the batch of a three-dimensional product: each has 32 outputs of its own.

The inputs of an output are summed step by step within each of SK fixed ranges. The last program of a block to finish
adds the SK sums in order. SK depends on the weight's shape and the GPU, never on the number of rows. A tile has 8, 16
or 32 rows, which are that many columns of the same instruction, and no column depends on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.linear_skinny import ptx
from kvcli.kernels.linear_skinny.reference import BLOCK, Weight, book

LEAST = 256  # fewest inputs of a range
AN_SM = 8  # programs of a multiprocessor at least, so that enough loads are under way
# Triton releases differ in fusing a product and a sum. It is off here, and tl.fma is used where it is meant. Stages
# would take loads through shared memory.
OPTIONS = {"num_warps": 2, "num_stages": 1, "enable_fp_fusion": False}
# Registers of quantized weights by rows of a tile, and 8 for groups of 16 and 32; unbound, ptxas spills some of them
# for more programs at once
REGISTERS = {8: 72, 16: 104, 32: 176}
# Inputs of a register of the first operand: Triton 3.6 doubles them behind `join`. Both have the same numbers.
WIDTH = 4 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 2

INT4_BF16, INT4_FP16 = tl.constexpr(ptx.int4(torch.bfloat16)), tl.constexpr(ptx.int4(torch.float16))
INT8_BF16, INT8_FP16 = tl.constexpr(ptx.int8(torch.bfloat16)), tl.constexpr(ptx.int8(torch.float16))
NF4_BF16, NF4_FP16 = (tl.constexpr(ptx.looked_up(ptx.NF4, dtype)) for dtype in (torch.bfloat16, torch.float16))
IQ4_BF16, IQ4_FP16 = (tl.constexpr(ptx.looked_up(ptx.IQ4, dtype)) for dtype in (torch.bfloat16, torch.float16))
MXFP4_BF16, MXFP4_FP16 = (tl.constexpr(ptx.looked_up(ptx.MXFP4, dtype)) for dtype in (torch.bfloat16, torch.float16))
OF4, OF8 = tl.constexpr(ptx.OF4), tl.constexpr(ptx.OF8)
WARPS, BN = tl.constexpr(2), tl.constexpr(BLOCK)


def linear(
    x: Tensor,
    w: Weight,
    bias: Tensor | None,
    sk: int = 0,
    dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute x [M, K] -> [M, N], added to `residual` [M, N]. `sk`: ranges, 0 = chosen for the GPU; `dtype`: of the
    result, None = that of x."""
    m, n = x.shape[0], w.shape[0]
    grid, tensors, consts = arguments(x, w, sk)
    y = x.new_empty(m, n, dtype=dtype)
    parts = y if consts["SK"] == 1 else x.new_empty(consts["SK"], m, n, dtype=torch.float32)
    linear_kernel[grid](
        *tensors, bias, parts, w.arrivals, y, residual, m, n,
        maxnreg=None if w.kind == "plain" else REGISTERS[consts["BM"]] + 8 * (0 < w.group <= 32), **consts, **OPTIONS,
    )  # fmt: skip
    return y


def arguments(
    x: Tensor, w: Weight, sk: int = 0
) -> tuple[tuple[int, int, int], Sequence[Tensor | None], dict[str, Any]]:
    """Return the grid, the tensors and the constants of `part_of`."""
    m, (n, k) = x.shape[0], w.shape
    sk, tile = sk or stretches(n, k, _processors(x.device)), 8 if m <= 8 else 16 if m <= 16 else 32
    consts = {"K": k, "STEP": w.step, "BM": tile, "SK": sk, "KIND": w.kind, "ABOVE": ptx.ABOVE[x.dtype]}
    consts |= {"PTX": x.is_cuda, "WIDTH": 2 if w.kind == "plain" else WIDTH}
    return (
        (triton.cdiv(n, BLOCK), sk, triton.cdiv(m, tile)),
        (x, w.data, _words(w.scale), _words(w.factor), book(w.kind, x.device, x.dtype)),
        consts,
    )


def widen(w: Weight, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Dequantize outputs `first`, a multiple of 64, to `last`, [last - first, K]; for int8 return the codes alone."""
    k = w.shape[1]
    y = torch.empty(last - first, k, dtype=dtype, device=w.data.device)
    widen_kernel[(triton.cdiv(last - first, BLOCK), triton.cdiv(k, max(w.step, 32)))](
        w.data, _words(w.scale), _words(w.factor), book(w.kind, y.device, dtype), y, first, last,
        w.data.shape[0] * BLOCK, K=k, STEP=w.step, KIND=w.kind, ABOVE=ptx.ABOVE[dtype], PTX=y.is_cuda, **OPTIONS,
    )  # fmt: skip
    return y


def stretches(n: int, k: int, processors: int) -> int:
    """Return the number of ranges for a weight's inputs."""
    return max(1, min(AN_SM * processors // triton.cdiv(n, BLOCK), k // LEAST))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _words(t: Tensor | None) -> Tensor | None:
    """Return scales or factors; pairs are viewed as one number each."""
    return t if t is None or t.dim() < 5 else t.view(torch.int32 if t.itemsize == 2 else torch.int16).squeeze(-1)


# ---- on the GPU ----


@triton.jit(do_not_specialize=["M"])  # or Triton would compile another kernel for one row
def linear_kernel(
    p_x, p_w, p_scale, p_factor, p_book, p_bias, p_parts, p_arrivals, p_y, p_residual, M, N,
    K: tl.constexpr, STEP: tl.constexpr, BM: tl.constexpr, SK: tl.constexpr, KIND: tl.constexpr, ABOVE: tl.constexpr,
    PTX: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute BM rows and 64 outputs of the result; grid (N / 64, SK, M / BM)."""
    b_out = part_of(p_x, p_w, p_scale, p_factor, p_book, M, N, K, STEP, BM, SK, KIND, ABOVE, PTX, WIDTH)
    block, part, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_m, i_n = tile * BM + tl.arange(0, BM)[None, :], block * BN + tl.arange(0, BN)[:, None]
    m_y = (i_m < M) & (i_n < N)
    at = i_m.to(tl.int64) * N + i_n
    if SK > 1:
        size = M.to(tl.int64) * N
        tl.store(p_parts + part * size + at, b_out, mask=m_y)
        tl.debug_barrier()  # all warps have stored
        p_arrived = p_arrivals + tile * tl.num_programs(0) + block
        if tl.atomic_add(p_arrived, 1, sem="acq_rel", scope="gpu") < SK - 1:
            return
        tl.store(p_arrived, 0)
        b_out = tl.load(p_parts + at, mask=m_y, other=0.0, cache_modifier=".cg")
        for i in tl.static_range(1, SK):
            b_out += tl.load(p_parts + i * size + at, mask=m_y, other=0.0, cache_modifier=".cg")
    i_n = tl.minimum(i_n, N - 1)
    if KIND == "int8":
        b_out *= tl.load(p_scale + i_n).to(tl.float32)
    if p_bias is not None:
        b_out += tl.load(p_bias + i_n).to(tl.float32)
    if p_residual is not None:
        b_out = b_out.to(p_y.dtype.element_ty).to(tl.float32)
        b_out += tl.load(p_residual + at, mask=m_y, other=0.0).to(tl.float32)
    tl.store(p_y + at, b_out.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit
def part_of(
    p_x, p_w, p_scale, p_factor, p_book, M, N, K: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
    SK: tl.constexpr, KIND: tl.constexpr, ABOVE: tl.constexpr, PTX: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return a program's range of 64 outputs for BM rows, [64, BM] float32; of int8 without scales."""
    HALVES: tl.constexpr = 2 if GROUP == 16 else 1  # of a step: groups of 16 are the two halves of a unit
    STEP: tl.constexpr = GROUP * HALVES
    block, part, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    NT: tl.constexpr = BM // 8
    UNITS: tl.constexpr = STEP // 32
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    dtype: tl.constexpr = p_x.dtype.element_ty
    # each warp loads the rows for itself; rows beyond M repeat the last one. By unit, eight, warp, row of eight
    i_r = tl.arange(0, UNITS * NT * WARPS * 8)
    row = tl.minimum(tile * BM + i_r // (8 * WARPS) % NT * 8 + i_r % 8, M - 1)
    i_k = (i_r // (8 * WARPS * NT) * 32)[:, None] + tl.arange(0, 32)[None, :]
    p_row = p_x + row[:, None] * K + i_k
    lane = tl.arange(0, BN)  # each has four scales; lanes of the same outputs load the same
    i_s = (block * BN + lane // 32 * 32 + lane % 32 // 4 * 4)[:, None] + tl.arange(0, 4)[None, :]
    b_sum = tl.zeros([WARPS, 32, BM], tl.float32)
    b_y = tl.zeros([WARPS, 2, 2, 8, NT, 4, 2], tl.float32)
    for step in range(part * STEPS // SK, (part + 1) * STEPS // SK):
        b_w = _numbers(p_w, p_book, block, step, N, K, UNITS, dtype, KIND, PTX)
        # warp | of outputs: two eights, output | of inputs: unit, half, pair, eight, e
        if WIDTH == 2:
            b_w = tl.permute(b_w, (1, 4, 5, 2, 0, 6, 7, 3, 8))
        else:
            b_w = tl.permute(b_w, (1, 4, 5, 2, 0, 6, 3, 7, 8))
        b_w = tl.reshape(b_w, [WARPS, 32, STEP])
        for half in tl.static_range(HALVES):
            if HALVES > 1:  # a product of all inputs, where those of the other group are 0
                b_x = tl.load(p_row + step * STEP, mask=i_k // GROUP == half, other=0.0)
            elif K % STEP != 0:
                b_x = tl.load(p_row + step * STEP, mask=step * STEP + i_k < K, other=0.0)
            else:
                b_x = tl.load(p_row + step * STEP)
            b_x = tl.reshape(
                b_x, [UNITS, NT, WARPS, 8, 4, 2, 2, 2]
            )  # unit, eight, warp, row | lane's 16 bytes: half, pair, e
            b_n = tl.reshape(tl.permute(b_x, (2, 0, 5, 6, 4, 7, 1, 3)), [WARPS, STEP, BM])
            b_x = b_n if WIDTH == 2 else tl.reshape(tl.permute(b_x, (2, 0, 5, 4, 6, 7, 1, 3)), [WARPS, STEP, BM])
            if KIND == "plain" or KIND == "int8":
                b_sum = tl.dot(b_w, b_x, b_sum)
            else:
                size = tl.num_programs(0) * BN
                b_s, b_z = _scales_of(p_scale, p_factor, i_s, step * HALVES + half, size, GROUP, KIND, ABOVE, dtype)
                b_y = tl.fma(tl.reshape(tl.dot(b_w, b_x), b_y.shape), _of_outputs(b_s, b_y), b_y)
                if KIND == "int4" or KIND == "blocks4" or p_scale.dtype.element_ty == tl.int32:
                    # the sums of the inputs, as a product with ones: in the order and the lanes of the others
                    b_one = tl.dot(tl.full([WARPS, 16, STEP], 1.0, dtype), b_n)
                    b_one = tl.broadcast_to(tl.reshape(b_one, [WARPS, 1, 2, 8, NT, 4, 2]), b_y.shape)
                    b_y = tl.fma(b_one, _of_outputs(b_z, b_y), b_y)
    return tl.reshape(b_sum if KIND == "plain" or KIND == "int8" else b_y, [BN, BM])


@triton.jit
def _numbers(
    p_w, p_book, block, step, N, K: tl.constexpr, UNITS: tl.constexpr, dtype: tl.constexpr, KIND: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Load a step of the weight, without scales: [unit, warp, output, eight, two eights of outputs, half, pair, e]."""
    if KIND == "plain":
        i_r = tl.arange(0, UNITS * 4 * WARPS * 8)  # unit, two eights, warp, output
        i_n = block * BN + i_r // 8 % WARPS * 32 + i_r // (8 * WARPS) % 4 * 8 + i_r % 8
        i_k = step * (UNITS * 32) + (i_r // (32 * WARPS) * 32)[:, None] + tl.arange(0, 32)[None, :]
        p_b = p_w + tl.minimum(i_n, N - 1)[:, None].to(tl.int64) * K + i_k
        b_w = tl.load(p_b, mask=i_k < K, other=0.0) if K % (UNITS * 32) != 0 else tl.load(p_b)
        b_w = tl.reshape(b_w, [UNITS, 2, 2, WARPS, 8, 4, 2, 2, 2])
        return tl.permute(b_w, (0, 3, 4, 5, 1, 2, 6, 7, 8))
    else:
        SIZE: tl.constexpr = UNITS * BN * (2 if KIND == "int8" or KIND == "blocks8" else 1)  # lanes of a step
        STEPS: tl.constexpr = (K + UNITS * 32 - 1) // (UNITS * 32)
        i_w = (tl.arange(0, SIZE) * 4)[:, None] + tl.arange(0, 4)[None, :]
        # past the first cache, which keeps the rows
        b_w = tl.load(p_w + (block.to(tl.int64) * STEPS + step) * (SIZE * 4) + i_w, cache_modifier=".cg")
        if KIND == "int8" or KIND == "blocks8":
            # tensors [lanes, 4], by second eight and pair
            if PTX:
                WIDE: tl.constexpr = INT8_BF16 if dtype == tl.bfloat16 else INT8_FP16
                t_0, t_1, t_2, t_3 = tl.inline_asm_elementwise(
                    WIDE, OF8, [b_w], dtype=(dtype.value,) * 4, is_pure=True, pack=2
                )
            else:
                t_0, t_2 = _codes(b_w, b_w, 0, 16, 0, dtype, "int8")
                t_1, t_3 = _codes(b_w, b_w, 8, 16, 0, dtype, "int8")
            b_w = tl.join(tl.join(t_0, t_2), tl.join(t_1, t_3))
            b_w = tl.reshape(b_w, [UNITS, 2, WARPS, 8, 4, 2, 2, 2, 2])  # unit, half, .., eights 0, e, eights 1, pair
            return tl.permute(b_w, (0, 2, 3, 4, 5, 7, 1, 8, 6))
        else:
            t_0, t_1, t_2, t_3, t_4, t_5, t_6, t_7 = _widen4(b_w, p_book, dtype, KIND, PTX)
            b_w = tl.join(tl.join(tl.join(t_0, t_4), tl.join(t_2, t_6)), tl.join(tl.join(t_1, t_5), tl.join(t_3, t_7)))
            b_w = tl.reshape(b_w, [UNITS, WARPS, 8, 4, 2, 2, 2, 2, 2])  # .., eights 0, e, eights 1, half, pair
            return tl.permute(b_w, (0, 1, 2, 3, 4, 6, 7, 8, 5))


@triton.jit
def _widen4(b_w, p_book, dtype: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr):
    """Widen words [R, 4] to eight tensors [R, 4]: tensor 4 j + p has pair p of the words j and 2 + j."""
    IS_INT: tl.constexpr = KIND == "int4" or KIND == "blocks4"
    if PTX:
        IS_BF16: tl.constexpr = dtype == tl.bfloat16
        INT4: tl.constexpr = INT4_BF16 if IS_BF16 else INT4_FP16
        NF4: tl.constexpr = NF4_BF16 if IS_BF16 else NF4_FP16
        IQ4: tl.constexpr = IQ4_BF16 if IS_BF16 else IQ4_FP16
        MXFP4: tl.constexpr = MXFP4_BF16 if IS_BF16 else MXFP4_FP16
        return tl.inline_asm_elementwise(
            INT4 if IS_INT else NF4 if KIND == "nf4" else IQ4 if KIND == "iq4" else MXFP4, OF4, [b_w],
            dtype=(dtype.value,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        NEXT: tl.constexpr = 16 if IS_INT else 4  # bits from a code of a pair to the other
        PAIR: tl.constexpr = 4 if IS_INT else 8
        ABOVE: tl.constexpr = 128 if dtype == tl.bfloat16 else 0
        CODES: tl.constexpr = "int4" if IS_INT else KIND
        b_0, b_1 = _codes(b_w, p_book, 0, NEXT, ABOVE, dtype, CODES)
        b_2, b_3 = _codes(b_w, p_book, PAIR, NEXT, ABOVE, dtype, CODES)
        b_4, b_5 = _codes(b_w, p_book, 2 * PAIR, NEXT, ABOVE, dtype, CODES)
        b_6, b_7 = _codes(b_w, p_book, 3 * PAIR, NEXT, ABOVE, dtype, CODES)
        return b_0, b_2, b_4, b_6, b_1, b_3, b_5, b_7


@triton.jit
def _codes(
    b_w, p_book, FIRST: tl.constexpr, NEXT: tl.constexpr, ABOVE: tl.constexpr, dtype: tl.constexpr, KIND: tl.constexpr
):
    """Widen the pair of codes at bits FIRST and FIRST + NEXT of words [R, 4]: of words 0 and 2, of words 1 and 3."""
    b_w = tl.join(b_w >> FIRST, b_w >> (FIRST + NEXT))
    if KIND == "int8":
        b_c = b_w.to(tl.int8).to(tl.float32).to(dtype)
    elif KIND == "int4":
        b_c = ((b_w & 15) + ABOVE).to(tl.float32).to(dtype)
    else:
        b_c = tl.load(p_book + (b_w & 15))
    b_c = tl.permute(tl.reshape(b_c, [b_c.shape[0], 2, 2, 2]), (0, 1, 3, 2))  # of a lane: word / 2, e, word % 2
    b_0, b_1 = tl.split(b_c)
    return tl.reshape(b_0, [b_c.shape[0], 4]), tl.reshape(b_1, [b_c.shape[0], 4])


@triton.jit
def _scales_of(
    p_scale, p_factor, i_s, group, size, GROUP: tl.constexpr, KIND: tl.constexpr, ABOVE: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Load a group's scales, and what a sum of inputs is multiplied with, of the numbers `i_s` of `size`; float32.

    Pairs are one word each: loads of two bytes take as long as wide ones.
    """
    SPAN: tl.constexpr = GROUP if p_factor is None else 256
    IS_PAIR: tl.constexpr = p_scale.dtype.element_ty == tl.int32
    HALF: tl.constexpr = dtype if KIND == "int4" else tl.float16
    b_d = tl.load(p_scale + group * GROUP // SPAN * size + i_s)
    if IS_PAIR:
        b_s = b_d.to(tl.int16).to(HALF, bitcast=True).to(tl.float32)
        b_z = (b_d >> 16).to(tl.int16).to(HALF, bitcast=True).to(tl.float32)
    else:
        b_s = b_d.to(tl.float32)
        b_z = tl.zeros_like(b_s)
    if p_factor is not None:
        b_f = tl.load(p_factor + group * size + i_s)
        b_s *= b_f.to(tl.int8).to(tl.float32)
        if IS_PAIR:
            b_z *= (b_f >> 8).to(tl.int8).to(tl.float32)
    if KIND != "int4":
        b_z = -b_z  # blocks subtract it
    if KIND == "int4" or KIND == "blocks4":
        LESS: tl.constexpr = ABOVE + (0.0 if KIND == "blocks4" and IS_PAIR else 8.0)
        b_z = tl.fma(b_s, tl.full(b_s.shape, -LESS, tl.float32), b_z)
    return b_s, b_z


@triton.jit
def _of_outputs(b_s, b_y):
    """Broadcast numbers of lanes [64, 4] to [warp, two eights, output, rows]."""
    b_s = tl.permute(tl.reshape(b_s, [WARPS, 8, 4, 2, 2]), (0, 3, 4, 1, 2))
    return tl.broadcast_to(b_s[:, :, :, :, None, :, None], b_y.shape)


@triton.jit(do_not_specialize=["first", "last"])
def widen_kernel(
    p_w, p_scale, p_factor, p_book, p_y, first, last, N,
    K: tl.constexpr, STEP: tl.constexpr, KIND: tl.constexpr, ABOVE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Dequantize a step of 64 outputs from `first` on, to [last - first, K]; grid (outputs / 64, K / STEP)."""
    block, step = first // BN + tl.program_id(0), tl.program_id(1)
    HALVES: tl.constexpr = 2 if STEP == 16 else 1
    WIDE: tl.constexpr = STEP * HALVES
    LESS: tl.constexpr = ABOVE if KIND == "int4" or KIND == "blocks4" else 0
    dtype: tl.constexpr = p_y.dtype.element_ty
    b_w = _numbers(p_w, p_book, block, step, N, K, WIDE // 32, dtype, KIND, PTX)
    b_w = tl.reshape(tl.permute(b_w, (1, 4, 5, 2, 0, 3, 6, 7, 8)), [BN, WIDE])  # as outputs and inputs are counted
    i_o, i_k = tl.arange(0, BN), tl.arange(0, WIDE)[None, :]
    if KIND != "int8":
        i_s = block * BN + i_o // 32 * 32 + i_o % 8 * 4 + i_o // 8 % 4
        b_y = tl.zeros([BN, WIDE], tl.float32)
        for half in tl.static_range(HALVES):
            b_s, b_z = _scales_of(p_scale, p_factor, i_s, step * HALVES + half, N, STEP, KIND, 0, dtype)
            b_y = tl.where(i_k // STEP == half, (b_w.to(tl.float32) - LESS) * b_s[:, None] + b_z[:, None], b_y)
        b_w = b_y
    i_n, i_k = block * BN - first + i_o, step * WIDE + i_k
    there = (i_n < last - first)[:, None] & (i_k < K)
    tl.store(p_y + i_n[:, None].to(tl.int64) * K + i_k, b_w.to(dtype), mask=there)
