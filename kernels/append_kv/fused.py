"""Commit accepted rows in Triton: one program per layer and head, which alone reads and updates the head's length."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.append_kv import COLUMNS

ROWS = 16  # copied by a program at a time


@triton.jit
def append_kernel(
    p_layers,  # [L, COLUMNS] int64 addresses, and two strides
    p_path,  # [F] int32
    p_count,  # [1] int32
    p_row_pos,  # [M] int32
    p_like,  # has the dtype of keys and values; not read
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    DP: tl.constexpr,
    EP: tl.constexpr,
    R: tl.constexpr,
):
    """Commit the rows of one layer and head; grid (L, K). Strides of new KV are in units of a row."""
    p_layer, head = p_layers + tl.program_id(0) * COLUMNS, tl.program_id(1)
    p_k = tl.multiple_of(tl.load(p_layer).to(p_like.dtype), 16)
    p_v = tl.multiple_of(tl.load(p_layer + 1).to(p_like.dtype), 16)
    p_pos, p_start = tl.load(p_layer + 2).to(p_path.dtype), tl.load(p_layer + 3).to(p_path.dtype)
    p_length, p_pos_start = tl.load(p_layer + 4).to(p_path.dtype), tl.load(p_layer + 5).to(p_path.dtype)
    p_fk = tl.multiple_of(tl.load(p_layer + 6).to(p_like.dtype), 16)
    p_fv = tl.multiple_of(tl.load(p_layer + 7).to(p_like.dtype), 16)
    by_head, by_row = tl.load(p_layer + 8), tl.load(p_layer + 9)
    count, length = tl.load(p_count), tl.load(p_length + head)
    to, to_pos = tl.load(p_start + head) + length, tl.load(p_pos_start + head) + length
    d, e = tl.arange(0, DP), tl.arange(0, EP)
    for a in range(0, count, R):
        i = a + tl.arange(0, R)
        m_row = i < count
        row = tl.load(p_path + i, mask=m_row, other=0)  # [R]
        at = (head * by_head + row * by_row)[:, None]  # int64, as are the strides
        slot = (to + i).to(tl.int64)[:, None]
        m_k, m_v = m_row[:, None] & (d < D)[None, :], m_row[:, None] & (e < E)[None, :]
        k = tl.load(p_fk + at * D + d[None, :], mask=m_k, other=0.0)  # [R, DP]
        v = tl.load(p_fv + at * E + e[None, :], mask=m_v, other=0.0)  # [R, EP]
        tl.store(p_k + slot * D + d[None, :], k, mask=m_k)
        tl.store(p_v + slot * E + e[None, :], v, mask=m_v)
        tl.store(p_pos + to_pos + i, tl.load(p_row_pos + row, mask=m_row, other=0), mask=m_row)
    tl.debug_barrier()  # every warp has read the length
    tl.store(p_length + head, length + count)


def append_kv(
    layers: Tensor, path: Tensor, count: Tensor, row_pos: Tensor, *, heads: int, d: int, e: int, like: Tensor
) -> None:
    """Commit rows. layers [L, COLUMNS] from `addresses`, with `heads` KV heads, keys of size `d` and values of size `e`
    in the dtype of `like`; other arguments as in the reference."""
    sizes = {"D": d, "E": e, "DP": triton.next_power_of_2(d), "EP": triton.next_power_of_2(e)}
    grid = layers.shape[0], heads
    append_kernel[grid](
        layers, path, count, row_pos, like, COLUMNS=COLUMNS, **sizes, R=ROWS, num_warps=4, enable_fp_fusion=False
    )
