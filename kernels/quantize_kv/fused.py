"""Quantization of keys and values in Triton: codes and scales bit for bit equal to the reference, in one pass.

Divisions are IEEE divisions; numbers are rounded to even by adding and subtracting 1.5 * 2^23. The Hadamard transform
before quantization is here too. Its signs are computed in place, and are exact in bfloat16; a float32 is split into
three bfloat16. The transform is batch invariant.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.quantize_kv import reference

LARGEST, TINIEST = tl.constexpr(reference.LARGEST), tl.constexpr(reference.TINIEST)
ROUNDER = tl.constexpr(12582912.0)
NUMBERS = 4096  # per program
ROWS, CHANNELS = 16, 32  # per program of `turn_kernel`
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


def round_range(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [A, m, D] in groups along dim 1, or [A, m, c] along dim 2 -> packed codes [A * m, ..], scale and zero
    as x without that dimension."""
    a, m, d = x.shape
    codes = x.new_empty(a * m, d * bits // 8, dtype=torch.uint8)
    scale, zero = (x.new_empty((a, d) if dim == 1 else (a, m), dtype=torch.float16) for _ in "sz")
    if not x.numel():
        return codes, scale, zero
    slots, channels = triton.next_power_of_2(m), triton.next_power_of_2(d)
    if dim == 1:  # a program quantizes some channels of a group
        channels = max(8, min(channels, NUMBERS // slots))
        grid = (a, triton.cdiv(d, channels))
    else:  # groups are contiguous: a program quantizes several whole groups
        a, m = 1, a * m
        slots = max(1, NUMBERS // channels)
        grid = (triton.cdiv(m, slots), 1)
    range_kernel[grid](x.contiguous(), codes, scale, zero, m, d, BITS=bits, X=slots, Y=channels, DIM=dim - 1, **OPTIONS)
    return codes, scale, zero


def round_scaled(x: Tensor, room: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantize x [S, D] -> codes int8 [S, D], scale [S]; with `room` codes [D, room], scale [room], zeros after S."""
    s, d = x.shape
    n, channels = s if room is None else room, triton.next_power_of_2(d)
    codes = x.new_empty((s, d) if room is None else (d, n), dtype=torch.int8)
    scale = x.new_empty(n, dtype=torch.float16)
    if n:
        slots = max(16, NUMBERS // channels)
        scaled_kernel[(triton.cdiv(n, slots),)](
            x.contiguous(), codes, scale, s, n, D=d, X=slots, Y=channels, TURNED=room is not None, **OPTIONS
        )
    return codes, scale


def turned(x: Tensor) -> Tensor:
    """Multiply x [.., D] by `reference.hadamard(D)`, in float32; D a power of two, at least 16."""
    d = x.shape[-1]
    out = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    n = out.numel() // d
    if n:
        turn_kernel[(triton.cdiv(n, ROWS), triton.cdiv(d, CHANNELS))](
            x.contiguous(), out, d**-0.5, n, D=d, M=ROWS, X=min(d, 64), B=min(d, CHANNELS),
            THREE=x.dtype != torch.bfloat16, **OPTIONS,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n_rows"])
def turn_kernel(
    p_x, p_out, by, n_rows, D: tl.constexpr, M: tl.constexpr, X: tl.constexpr, B: tl.constexpr, THREE: tl.constexpr
):
    """Transform rows; grid (blocks of M rows, blocks of B channels). THREE: numbers have more than 8 bits."""
    row, i_in = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M), tl.arange(0, X)
    i_out = tl.program_id(1) * B + tl.arange(0, B)
    live = (row < n_rows)[:, None]
    y = tl.zeros([M, B], tl.float32)
    for first in range(0, D, X):
        x = tl.load(p_x + row[:, None] * D + (first + i_in)[None, :], mask=live, other=0.0)  # [M, X]
        # [X, B]; the sign is the parity of the bits set in both indices
        both = (first + i_in)[:, None] & i_out[None, :]
        both = both ^ both >> 4
        both = both ^ both >> 2
        sign = (1 - 2 * ((both ^ both >> 1) & 1)).to(tl.float32).to(tl.bfloat16)
        most = x.to(tl.bfloat16)
        y = tl.dot(most, sign, y)
        if THREE:
            left = x.to(tl.float32) - most.to(tl.float32)
            more = left.to(tl.bfloat16)
            y = tl.dot(more, sign, y)
            y = tl.dot((left - more.to(tl.float32)).to(tl.bfloat16), sign, y)
    tl.store(p_out + row[:, None] * D + i_out[None, :], y * by, mask=live)


@triton.jit(do_not_specialize=["m"])
def range_kernel(
    p_x, p_code, p_scale, p_zero, m, d, BITS: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, DIM: tl.constexpr
):
    """Quantize groups; grid (groups of m slots, blocks of Y channels) for DIM 0, (blocks of X groups, 1) for DIM 1."""
    i_x, i_y = tl.arange(0, X), tl.program_id(1) * Y + tl.arange(0, Y)
    if DIM == 0:
        row, held = tl.program_id(0).to(tl.int64) * m + i_x, i_x < m
    else:
        row = tl.program_id(0).to(tl.int64) * X + i_x
        held = row < m
    mask = held[:, None] & (i_y < d)[None, :]
    p = p_x + row[:, None] * d + i_y[None, :]
    x = tl.load(p, mask=mask, other=0.0).to(tl.float32)  # [X, Y]
    levels: tl.constexpr = (1 << BITS) - 1
    low = tl.min(tl.where(mask, x, float("inf")), DIM)
    high = tl.max(tl.where(mask, x, float("-inf")), DIM)
    zero = tl.minimum(tl.maximum(low, -LARGEST), LARGEST).to(tl.float16)
    scale = tl.div_rn(high - zero.to(tl.float32), tl.full(high.shape, levels, tl.float32))
    scale = tl.minimum(tl.maximum(scale, TINIEST), LARGEST).to(tl.float16)
    if DIM == 0:
        i, there = tl.program_id(0).to(tl.int64) * d + i_y, i_y < d
    else:
        i, there = row, held
    tl.store(p_zero + i, zero, mask=there)
    tl.store(p_scale + i, scale, mask=there)
    below = tl.broadcast_to(tl.expand_dims(zero.to(tl.float32), DIM), [X, Y])
    step = tl.broadcast_to(tl.expand_dims(scale.to(tl.float32), DIM), [X, Y])
    q = tl.div_rn(x - below, step)
    q = (tl.minimum(tl.maximum(q, 0.0), levels) + ROUNDER - ROUNDER).to(tl.uint8)
    q0, q1 = tl.split(tl.reshape(q, [X, Y // 2, 2]))
    byte = q0 | q1 << BITS
    if BITS == 2:
        b0, b1 = tl.split(tl.reshape(byte, [X, Y // 4, 2]))
        byte = b0 | b1 << 4
    n: tl.constexpr = Y * BITS // 8
    i_byte = tl.program_id(1) * n + tl.arange(0, n)
    width = d * BITS // 8
    tl.store(p_code + row[:, None] * width + i_byte[None, :], byte, mask=held[:, None] & (i_byte < width)[None, :])


@triton.jit(do_not_specialize=["s"])
def scaled_kernel(
    p_x, p_code, p_scale, s, room, D: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, TURNED: tl.constexpr
):
    """Quantize slots with one scale per slot; grid (blocks of X slots,). Codes [S, D], or [D, room] if TURNED."""
    row, i_y = tl.program_id(0).to(tl.int64) * X + tl.arange(0, X), tl.arange(0, Y)
    held = row < s
    x = tl.load(p_x + row[:, None] * D + i_y[None, :], mask=held[:, None] & (i_y < D)[None, :], other=0.0)
    x = x.to(tl.float32)  # [X, Y]
    most = tl.max(tl.abs(x), 1)
    scale = tl.minimum(tl.maximum(tl.div_rn(most, tl.full(most.shape, 127.0, tl.float32)), TINIEST), LARGEST)
    scale = scale.to(tl.float16)
    tl.store(p_scale + row, tl.where(held, scale, tl.zeros_like(scale)), mask=row < room)
    q = tl.div_rn(x, tl.broadcast_to(scale.to(tl.float32)[:, None], [X, Y]))
    q = (tl.minimum(tl.maximum(q, -127.0), 127.0) + ROUNDER - ROUNDER).to(tl.int8)
    i = i_y[None, :].to(tl.int64) * room + row[:, None] if TURNED else row[:, None] * D + i_y[None, :]
    tl.store(p_code + i, q, mask=(row < room)[:, None] & (i_y < D)[None, :])
