"""Batch-invariant attention over stored slots and new KV in Triton: one sequence per row, in a fixed partition.

The sequence is cut into spans by index alone, the same for every length and number of rows. In a span, tiles of slots
update a running softmax (arXiv 2205.14135) from its beginning on; spans are merged in order at the end. A tile of
stored slots is the same for all rows; from the first other tile on, a program computes one path of the tree. Rows are
padded to 16 or 32, which is the same instruction once or twice, so a row alone has the bits of a row among many.
Prefill is not batch invariant: its many rows use a single span without end, in larger tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels import triton_support
from kvcli.kernels.attend_invariant.tables import Table, Tree
from kvcli.kernels.merge_attention.fused import LN2, LOG2E, fold

UNIT = 128  # slots per span of the first spans; see `first_of`
WHOLE = 1 << 26  # a unit beyond any length
TOGETHER = 32  # spans that are merged at once
SCANNED = tl.constexpr(512)  # positions


@triton.jit
def first_of(span, UNIT: tl.constexpr):
    """Return the first slot of a span. 32 spans have one unit, 56 have four, the others 16: short sequences are read by
    many programs, and long ones write few partial results."""
    fine, coarse = tl.minimum(span, 32), tl.maximum(span - 88, 0)
    return (fine + 4 * (span - fine - coarse) + 16 * coarse) * UNIT


@triton.jit
def span_of(slot, UNIT: tl.constexpr):
    """Return the span of a slot."""
    unit = slot // UNIT
    return tl.where(unit < 32, unit, tl.where(unit < 256, 24 + unit // 4, 72 + unit // 16))


def n_spans(slots: int, unit: int = UNIT) -> int:
    """Return the number of spans of so many slots."""
    last = max(slots - 1, 0) // unit
    return 1 + (last if last < 32 else 24 + last // 4 if last < 256 else 72 + last // 16)


@triton.jit
def _weigh(q, k, m_seen, top, mass, scale, softcap):
    """Add a tile of B slots to the softmax state of M rows: q [M, DP], k [DP, B], m_seen [M, B] or None = all. Return
    the new state with the weights [M, B], and the factor for earlier sums."""
    score = tl.dot(q, k) * scale  # [M, B] float32
    if softcap is not None:  # tanh by exp2; `scale` is the scale of its argument
        e = tl.exp2(-tl.abs(score))
        bent = (1.0 - e) / (1.0 + e) * softcap
        score = tl.where(score < 0, -bent, bent)
    if m_seen is not None:
        score = tl.where(m_seen, score, float("-inf"))
    new = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(score - safe[:, None])
    shrink = tl.exp2(top - safe)
    mass = mass * shrink + tl.sum(p, 1)
    return new, mass, p, shrink


@triton.jit(
    do_not_specialize=(
        "p_pos p_start p_length p_pos_start p_path p_path_of p_depth p_row_pos p_upto "
        "window n_rows n_before n_paths n_deep n_late n_spans"
    ).split()
)
def spans_kernel(
    p_q,
    p_k,  # [T, D]
    p_v,  # [T, E]
    p_pos,  # int32, or None: no window
    p_start,  # [K] int32, as are all tables below
    p_length,  # [K]
    p_pos_start,  # [K]
    p_fk,  # new KV; not read without a path
    p_fv,
    p_path,  # [P, n_deep], or None: no new KV
    p_path_of,  # [N]
    p_depth,  # [N]
    p_row_pos,  # [n_before + N]
    p_upto,  # [N]: a row sees slots before this index; or None
    p_out,  # [H, N, n_spans, E] float32
    p_lse,  # [H, N, n_spans] float32
    scale,
    softcap,  # or None
    window,
    q_head,
    q_row,
    fk_head,
    fk_row,
    fv_head,
    fv_row,
    n_rows,
    n_before,
    n_paths,
    n_deep,
    n_late,  # spans that contain new KV, at most
    n_spans,
    G: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    DP: tl.constexpr,
    EP: tl.constexpr,
    M: tl.constexpr,
    B: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Compute spans of rows; grid (blocks of rows, KV heads, late spans x paths + spans). Row r of a head is query head
    r % G of row r // G.

    For each row, lse is written in every span, -inf if no slot is visible; out is written only if a slot is visible.
    """
    head, i = tl.program_id(1), tl.program_id(2)
    start, length = tl.load(p_start + head), tl.load(p_length + head)
    r = tl.program_id(0) * M + tl.arange(0, M)
    n, h = r // G, head * G + r % G
    mine = n < n_rows  # [M]
    # long spans first, so that the last programs are short
    span, path = n_spans - 1 - (i - n_late * n_paths), 0
    if p_path is None:
        last = tl.where(mine, length - 1, -1)  # [M] the last slot that a row sees
    else:
        on, late = tl.load(p_path_of + n, mask=mine, other=-1), span_of(length, UNIT)
        is_late = i < n_late * n_paths
        path = i % n_paths
        mine = tl.where(is_late, on == path, on >= 0)
        is_theirs = (span >= late) & (span < late + n_late)
        span = tl.where(is_late, late + i // n_paths, span)
        if (span >= n_spans) | (is_theirs & (i >= n_late * n_paths)) | (tl.max(mine.to(tl.int32), 0) == 0):
            return
        last = tl.where(mine, length + tl.load(p_depth + n, mask=mine, other=0), -1)
    if p_upto is not None:
        last = tl.minimum(last, tl.load(p_upto + n, mask=mine, other=0) - 1)

    begin, end = first_of(span, UNIT), tl.minimum(first_of(span + 1, UNIT), tl.max(last, 0) + 1)
    full = tl.maximum(begin, tl.minimum(end, length) // B * B)  # all slots of the tiles before are stored
    low = begin
    edge = last  # positions up to this one are outside the row's window
    if p_pos is not None:
        edge = tl.load(p_row_pos + n_before + n, mask=mine, other=2147483647) - window
        nearest, first, pos_start = tl.min(edge, 0), full, tl.load(p_pos_start + head)
        for b in range(begin, full, SCANNED):
            s = b + tl.arange(0, SCANNED)
            pos = tl.load(p_pos + pos_start + s, mask=s < full, other=-1)  # [SCANNED]
            first = tl.minimum(first, tl.min(tl.where((pos >= 0) & (pos > nearest), s, full), 0))
        low = first // B * B

    d, e = tl.arange(0, DP), tl.arange(0, EP)
    m_q = mine[:, None] & (d < D)[None, :]
    q = tl.load(p_q + (h * q_head)[:, None] + (n * q_row)[:, None] + d[None, :], mask=m_q, other=0.0)  # [M, DP]
    top = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, EP], tl.float32)
    for b in range(low, full, B):
        s = b + tl.arange(0, B)
        at = (start + s).to(tl.int64)
        if DP == D:
            k = tl.load(p_k + (at * D)[None, :] + d[:, None])  # [DP, B]
        else:
            k = tl.load(p_k + (at * D)[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)
        if EP == E:
            v = tl.load(p_v + (at * E)[:, None] + e[None, :])  # [B, EP]
        else:
            v = tl.load(p_v + (at * E)[:, None] + e[None, :], mask=(e < E)[None, :], other=0.0)
        m_seen = None
        if p_pos is not None:
            pos = tl.load(p_pos + pos_start + s)  # [B]
            m_seen = (pos >= 0)[None, :] & (pos[None, :] > edge[:, None])
            if p_upto is not None:
                m_seen = m_seen & (s[None, :] <= last[:, None])
        elif p_upto is not None:
            m_seen = s[None, :] <= last[:, None]
        top, mass, p, shrink = _weigh(q, k, m_seen, top, mass, scale, softcap)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])

    # these few tiles contain new KV or the end of stored slots; not worth memory for loads ahead
    for b in tl.range(full, end, B, num_stages=1):
        s = b + tl.arange(0, B)
        stored, at = s < length, (start + s).to(tl.int64)
        k = tl.load(p_k + (at * D)[None, :] + d[:, None], mask=stored[None, :] & (d < D)[:, None], other=0.0)
        shown = stored
        if p_path is not None:
            deep = s - length
            f = tl.load(p_path + path * n_deep + deep, mask=(deep >= 0) & (deep < n_deep), other=-1)  # [B] rows
            fresh = f >= 0
            p_key = p_fk + (head * fk_head + f * fk_row)[None, :] + d[:, None]
            # selects values, not addresses: selected addresses would make loads two bytes wide
            k = tl.where(fresh[None, :], tl.load(p_key, mask=fresh[None, :] & (d < D)[:, None], other=0.0), k)
            shown = stored | fresh
        m_seen = shown[None, :] & (s[None, :] <= last[:, None])
        if p_pos is not None:
            pos = tl.load(p_pos + pos_start + s, mask=stored, other=-1)  # [B]
            if p_path is not None:
                pos = tl.where(fresh, tl.load(p_row_pos + f, mask=fresh, other=-1), pos)
            m_seen = m_seen & (pos >= 0)[None, :] & (pos[None, :] > edge[:, None])
        top, mass, p, shrink = _weigh(q, k, m_seen, top, mass, scale, softcap)
        # values are loaded only now, because registers do not hold four tiles
        v = tl.load(p_v + (at * E)[:, None] + e[None, :], mask=stored[:, None] & (e < E)[None, :], other=0.0)
        if p_path is not None:
            p_value = p_fv + (head * fv_head + f * fv_row)[:, None] + e[None, :]
            v = tl.where(fresh[:, None], tl.load(p_value, mask=fresh[:, None] & (e < E)[None, :], other=0.0), v)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])

    some = mass > 0
    row = (h.to(tl.int64) * n_rows + n) * n_spans + span
    lse = tl.where(some, (top + tl.log2(tl.where(some, mass, 1.0))) * LN2, float("-inf"))
    tl.store(p_lse + row, lse, mask=mine)
    out = acc / tl.where(some, mass, 1.0)[:, None]
    tl.store(p_out + row[:, None] * E + e[None, :], out, mask=(mine & some)[:, None] & (e < E)[None, :])


def scratch_size(n_heads: int, rows: int, e: int, capacity: int, depth: int) -> int:
    """Return the float32 numbers between the kernels for a pass of so many rows and paths so deep, in any layer."""
    return n_heads * rows * n_spans(capacity + depth) * (e + 1)


def attend_invariant(
    q: Tensor,
    layer: Table,
    fresh_k: Tensor | None,
    fresh_v: Tensor | None,
    tree: Tree | None,
    scale: float,
    *,
    capacity: int,
    softcap: float = 0.0,
    window: int | None = None,
    sink: Tensor | None = None,
    row_pos: Tensor | None = None,
    upto: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    scratch: Tensor | None = None,
    is_prompt: bool = False,
    unit: int = UNIT,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of q [H, N, D] over the slots of a layer and, down a tree, fresh_k [K, M, D], fresh_v
    [K, M, E]. With `tree` None over the slots alone, with positions `row_pos` [N] for a window, and `upto` [N] to limit
    the slots.

    -> out [N, H, E] in q's dtype and lse [N, H] float32, written to `out` and `lse` if given. `capacity`: a bound on
    the slots of a head that the host knows; bits do not depend on it. `sink` [H] float32. `scratch`: float32 of
    `scratch_size`. With these three given nothing is allocated, and nothing waits, so the call can be captured.
    `is_prompt`: many rows, not batch invariant. `unit`, `tile`: of the partition, for tests.
    """
    h, n, d = q.shape
    kv, e = layer.start.shape[0], layer.v.shape[1]
    # limited by registers: heads of 256 use as many for 16 rows as heads of 128 for 32
    block, rows = (64, 16 if n * (h // kv) <= 16 else 32) if max(d, e) <= 128 else (32, 16)
    if is_prompt:
        unit, rows = WHOLE, 64 if window is None and not softcap else 32
    (paths, deep), before = ((0, 0), 0) if tree is None else (tree.path.shape, tree.pos.shape[0] - n)
    spans = n_spans(capacity + deep, unit)
    late = min(spans, (deep - 2 + unit) // unit + 1) if deep else 0
    scratch = scratch if scratch is not None else q.new_empty(h * n * spans * (e + 1), dtype=torch.float32)
    outs, lses = scratch[: h * n * spans * e].view(h, n, spans, e), scratch[h * n * spans * e :][: h * n * spans]
    out = q.new_empty(n, h, e) if out is None else out
    lse = q.new_empty(n, h, dtype=torch.float32) if lse is None else lse
    fresh = (q, q) if fresh_k is None or fresh_v is None else (fresh_k, fresh_v)  # not read without new KV
    slots = layer.k, layer.v, None if window is None else layer.pos, layer.start, layer.length
    slots_at = layer.start if layer.pos_start is None else layer.pos_start
    seen = (None, None, None, row_pos) if tree is None else (tree.path, tree.path_of, tree.depth, tree.pos)
    bent = (scale * LOG2E.value, None) if not softcap else (2 * scale / softcap * LOG2E.value, softcap * LOG2E.value)
    strides = [s for t in (q, *fresh) for s in _strides(t)]
    sizes = {"G": h // kv, "D": d, "E": e, "DP": _padded(d), "EP": _padded(e)}
    spans_kernel[(triton.cdiv(n * (h // kv), rows), kv, late * paths + spans)](
        *(q, *slots, slots_at, *fresh, *seen, upto, outs, lses),
        *(*bent, window or 0, *strides, n, before, paths, deep, late, spans),
        **sizes,
        **{"M": rows, "B": tile or block, "UNIT": unit},
        **{
            "num_warps": 8 if is_prompt else 4,
            "num_stages": triton_support.tiles_under_way(q.device),
            "enable_fp_fusion": False,
        },
    )
    fold(outs, lses, out, lse, sink=sink, rows=None if tree is None else tree.path_of, at_once=TOGETHER)
    return out, lse


def _strides(t: Tensor) -> tuple[int, int]:
    """Return the strides of heads and rows; a stride of size 1 is arbitrary and becomes 0, a multiple of 16."""
    assert t.stride(2) == 1, "numbers of a row are contiguous"
    return t.stride(0) * (t.shape[0] > 1), t.stride(1) * (t.shape[1] > 1)


def _padded(n: int) -> int:
    return max(16, triton.next_power_of_2(n))
