"""Experts in Triton: rows are listed by expert on the device, and each used expert's weights are read once.

A program counts how many of the pairs (row, choice) before each other have a lesser expert: no atomics, no host. A
product's programs are outputs times used experts; one goes through the rows of its expert in tiles, one after another,
so that a row's result depends on its own numbers and its expert. A last kernel adds a row's experts in the order of its
router. Prompts have wider tiles, and need not give the bits of decoding rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.linear_skinny import ptx
from kvcli.kernels.moe_linear import ExpertTensors

FEW = 64  # rows of a decoding pass, at most
TILES = (16, 64)  # rows of an expert at a time: of decoding passes, and of prompts
PP = 512  # pairs that a program lists
BN = 64  # outputs of a program
BLOCK = 256  # outputs of a program of `combine_kernel`
OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
CONSTRAINTS = tl.constexpr(ptx.OF_BYTES)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, up: ExpertTensors, down: ExpertTensors, between: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute rows x [M, K], experts ids [M, T] and their weights [M, T] -> [M, H]: by each of a row's experts `up`,
    `between`, `down`, then their weighted sum."""
    m, top = ids.shape
    order, table = lists(ids.flatten(), len(up.data))
    tile, out = TILES[m > FEW], x.new_empty(m, down.n)
    h = between(products(x, up, order, table, top, tile))
    y = products(h.contiguous(), down, order, table, 1, tile)
    grid = triton.cdiv(down.n, BLOCK), m
    combine_kernel[grid](y, weights.contiguous(), out, N=down.n, TOP=top, BLOCK=BLOCK, **OPTIONS)
    return out


def lists(ids: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """List pairs by expert: ids [P] of n experts -> pairs in order [P], and [4, U]: used experts, their first pair, the
    pair behind their last, and how many are used."""
    p, used = ids.shape[0], min(n, ids.shape[0])
    order, table = (torch.empty(size, dtype=torch.int32, device=ids.device) for size in (p, 4 * used))
    lists_kernel[(triton.cdiv(p, PP),)](ids, order, table, p, used, E=n, PP=PP, EP=triton.next_power_of_2(n), **OPTIONS)
    return order, table.view(4, used)


def products(x: Tensor, w: ExpertTensors, order: Tensor, table: Tensor, top: int, tile: int) -> Tensor:
    """Compute x [P / top, K] -> [P, N]: pair p has row p / top, and its expert's weights."""
    y = x.new_empty(order.shape[0], w.n)
    scale = w.data if w.scale is None else w.scale.view(torch.int32) if w.kind == "int4" else w.scale
    moe_kernel[(triton.cdiv(w.n, BN), table.shape[1])](
        x, w.data, scale, x if w.bias is None else w.bias, order, table, y, table.shape[1],
        w.data.stride(0), scale.stride(0),
        N=w.n, K=w.k, TOP=top, GROUP=w.group, BM=tile, BN=BN, BK=w.step, KIND=w.kind, IS_TURNED=w.is_turned,
        HAS_BIAS=w.bias is not None, ASM=ptx.int4_bytes(x.dtype) if x.is_cuda and w.kind == "int4" else "", **OPTIONS,
    )  # fmt: skip
    return y


# ---- on the GPU ----


@triton.jit(do_not_specialize=["P", "U"])
def lists_kernel(p_ids, p_order, p_table, P, U, E: tl.constexpr, PP: tl.constexpr, EP: tl.constexpr):
    """List PP pairs, and in the first program the experts; grid (P / PP)."""
    i, x = tl.program_id(0) * PP + tl.arange(0, PP), tl.arange(0, EP)
    b_e = tl.load(p_ids + i, mask=i < P, other=E).to(tl.int32)  # [PP]
    b_rank = tl.zeros([PP], tl.int32)
    b_count, b_end = tl.zeros([EP], tl.int32), tl.zeros([EP], tl.int32)
    for a in range(0, P, 16):
        j = a + tl.arange(0, 16)
        b_j = tl.load(p_ids + j, mask=j < P, other=E).to(tl.int32)
        is_before = (b_j[None, :] < b_e[:, None]) | ((b_j[None, :] == b_e[:, None]) & (j[None, :] < i[:, None]))
        b_rank += tl.sum((is_before & (j < P)[None, :]).to(tl.int32), 1)
        b_count += tl.sum((b_j[None, :] == x[:, None]).to(tl.int32), 1)
        b_end += tl.sum((b_j[None, :] <= x[:, None]).to(tl.int32), 1)
    tl.store(p_order + b_rank, i, mask=i < P)
    if tl.program_id(0) == 0:
        is_used = (b_count > 0) & (x < E)
        b_nth = tl.cumsum(is_used.to(tl.int32), 0) - 1
        tl.store(p_table + b_nth, x, mask=is_used)
        tl.store(p_table + U + b_nth, b_end - b_count, mask=is_used)
        tl.store(p_table + 2 * U + b_nth, b_end, mask=is_used)
        tl.store(p_table + 3 * U, tl.sum(is_used.to(tl.int32), 0))


@triton.jit(do_not_specialize=["U"])
def moe_kernel(
    p_x, p_w, p_scale, p_bias, p_order, p_table, p_y, U, by_w, by_scale,
    N: tl.constexpr, K: tl.constexpr, TOP: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, KIND: tl.constexpr, IS_TURNED: tl.constexpr, HAS_BIAS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute BN outputs of all pairs of a used expert; grid (N / BN, U). `by_w`, `by_scale`: from expert to expert."""
    at = tl.program_id(1)
    if at < tl.load(p_table + 3 * U):
        expert = tl.load(p_table + at).to(tl.int64)
        first, last = tl.load(p_table + U + at), tl.load(p_table + 2 * U + at)
        i_n = tl.program_id(0) * BN + tl.arange(0, BN)
        m_n = i_n < N
        p_mine, p_s = p_w + expert * by_w, p_scale + expert * by_scale
        for a in range(first, last, BM):
            i_m = a + tl.arange(0, BM)
            m_m = i_m < last
            pair = tl.load(p_order + i_m, mask=m_m, other=0)  # [BM]
            p_row = p_x + (pair // TOP).to(tl.int64) * K
            b_y = tl.zeros([BM, BN], tl.float32)
            for step in range(0, K // BK):
                b_x = tl.load(p_row[:, None] + step * BK + tl.arange(0, BK)[None, :], mask=m_m[:, None], other=0.0)
                if KIND == "int4":
                    b_even, b_odd = tl.split(tl.reshape(b_x, [BM, BK // 2, 2]))
                    i_b = step * (BK // 2) + tl.arange(0, BK // 2)
                    b_w = tl.load(p_mine + i_n[None, :] * (K // 2) + i_b[:, None], mask=m_n[None, :], other=0)
                    b_low, b_high = (b_w & 15).to(tl.float32) - 8.0, (b_w >> 4).to(tl.float32) - 8.0  # [BK / 2, BN]
                    b_low, b_high = b_low.to(b_x.dtype), b_high.to(b_x.dtype)
                    if ASM != "":  # the same in fewer instructions
                        b_low, b_high = tl.inline_asm_elementwise(
                            ASM, CONSTRAINTS, [b_w], dtype=(b_x.dtype, b_x.dtype), is_pure=True, pack=4
                        )
                    b_pair = tl.load(p_s + step * N + i_n, mask=m_n, other=0)  # [BN] int32: scale and zero
                    b_s = b_pair.to(tl.int16).to(b_x.dtype, bitcast=True).to(tl.float32)
                    b_z = (b_pair >> 16).to(tl.int16).to(b_x.dtype, bitcast=True).to(tl.float32)
                    b_found = tl.dot(b_odd, b_high, tl.dot(b_even, b_low))
                    b_y = tl.fma(b_found, tl.broadcast_to(b_s[None, :], b_y.shape), b_y)
                    b_sum = tl.broadcast_to(tl.sum(b_x.to(tl.float32), 1)[:, None], b_y.shape)
                    b_y = tl.fma(b_sum, tl.broadcast_to(b_z[None, :], b_y.shape), b_y)
                else:
                    i_k = step * BK + tl.arange(0, BK)
                    i_w = i_k[:, None] * N + i_n[None, :] if IS_TURNED else i_n[None, :] * K + i_k[:, None]
                    b_w = tl.load(p_mine + i_w, mask=m_n[None, :], other=0)  # [BK, BN]
                    if KIND == "int8":
                        b_w = b_w.to(tl.float32).to(b_x.dtype)  # exact
                    b_y = tl.dot(b_x, b_w, b_y)
            if KIND == "int8":
                b_y *= tl.load(p_s + i_n, mask=m_n, other=0)[None, :].to(tl.float32)
            if HAS_BIAS:
                b_y += tl.load(p_bias + expert * N + i_n, mask=m_n, other=0)[None, :].to(tl.float32)
            p_out = p_y + pair[:, None].to(tl.int64) * N + i_n[None, :]
            tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def combine_kernel(p_y, p_weight, p_out, N: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """Add a row's experts in their order, each times its weight; grid (N / BLOCK, M)."""
    i_n, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    m_n = i_n < N
    b_out = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(0, TOP):
        pair = row * TOP + j
        b_y = tl.load(p_y + pair.to(tl.int64) * N + i_n, mask=m_n, other=0.0).to(tl.float32)
        weight = tl.load(p_weight + pair).to(tl.float32)
        b_out = tl.fma(b_y, tl.broadcast_to(weight, [BLOCK]), b_out)
    tl.store(p_out + row.to(tl.int64) * N + i_n, b_out.to(p_out.dtype.element_ty), mask=m_n)
