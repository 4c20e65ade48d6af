"""Attention of rows over quantized slots in Triton: reads codes directly, all heads of a layer in one launch.

A head's slots are cut into spans and these into tiles, by index alone; there are as many spans as the table has room
for, so a captured pass remains valid while heads grow. A tile has one group of keys, and updates the running softmax of
its span (arXiv 2205.14135); spans are merged in order at the end. Rows are padded to 16 or 32, which is the same
instruction once or twice, so decoding rows are batch invariant. The many rows of a prefill pass are not: they use one
span, because their partial results would take gigabytes.

Products are of float16, whatever the dtype of the KV cache. Codes, scales and zeros are stored as float16, so a key has
11 bits, where bfloat16 has 8. Numbers beyond 65,504, which float16 cannot hold, are clipped by these layouts as well.
Weights are scaled so that the largest is 2^15, because small weights would otherwise become 0 in float16.

A byte becomes two numbers in three instructions: it is copied to both halves of a register, masked into the mantissas
of two float16, which are then 1024 + q and 1024 + 16 q, and corrected by one fused product for both. In PTX this takes
half the instructions of Triton's code for the plain form, which the interpreter runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels import triton_support
from kvcli.kernels.attend_invariant.fused import UNIT, WHOLE, first_of, n_spans
from kvcli.kernels.attend_invariant.passes import MANY
from kvcli.kernels.attend_quantized.table import PackedHead, PackedTable, table_of

LOG2E = 1.4426950408889634
LN2 = tl.constexpr(1 / LOG2E)
LARGEST = tl.constexpr(65504.0)  # the largest float16
ABOVE = tl.constexpr(15.0)  # log2 of the largest weight
MEETING = tl.constexpr(16)  # spans that are merged at once
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def _two_of(bits: int, first: int) -> str:
    """Return PTX: codes `first` and `first` + 1 of four bytes, times a scale, plus a zero; pairs of float16 each."""
    low, high = ((1 << bits) - 1 << bits * j for j in (first, first + 1))
    steps = [2.0 ** (-bits * j) for j in (first, first + 1)]
    one, less = (_pair([step * by for step in steps]) for by in (1.0, -1024.0))
    lines = [
        f"prmt.b32 ${i}, $4, 0, 0x4{i}4{i}; lop3.b32 ${i}, ${i}, {high << 16 | low:#x}, m, 0xEA;"
        f" fma.rn.f16x2 ${i}, ${i}, a, b; fma.rn.f16x2 ${i}, ${i}, ${5 + i}, ${9 + i};"
        for i in range(4)
    ]
    return f"{{ .reg .b32 m, a, b; mov.b32 m, 0x64006400; mov.b32 a, {one}; mov.b32 b, {less}; {' '.join(lines)} }}"


def _pair(numbers: Sequence[float]) -> str:
    """Return two float16 in 32 bits, the first in the lower ones."""
    low, high = torch.tensor(numbers, dtype=torch.float16).view(torch.int16).tolist()
    return f"{(high & 0xFFFF) << 16 | low & 0xFFFF:#x}"


PTX_4, PTX_2, PTX_2_BEHIND = (tl.constexpr(_two_of(*of)) for of in ((4, 0), (2, 0), (2, 2)))
# signed bytes: moved to 0 .. 255, put into the mantissa of 1024, moved back
PTX_8 = tl.constexpr(
    "{ .reg .b32 a, m, b; xor.b32 a, $2, 0x80808080; mov.b32 m, 0x64006400; mov.b32 b, 0xE480E480;"
    " prmt.b32 $0, a, 0, 0x4140; or.b32 $0, $0, m; add.rn.f16x2 $0, $0, b;"
    " prmt.b32 $1, a, 0, 0x4342; or.b32 $1, $1, m; add.rn.f16x2 $1, $1, b; }"
)


def attend_quantized(
    q: Tensor,
    heads: Sequence[PackedHead],
    scale: float,
    dtype: torch.dtype,
    softcap: float,
    masks: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Compute as the reference, for heads and masks that `table.why_not` accepts."""
    if all(mask is None for mask in masks):
        return attend(q, table_of(heads, masks, has_holes=False), scale, softcap)
    pos = [q.new_zeros(head.length, dtype=torch.int32) for head in heads]
    holes = [one if mask is None else one.masked_fill(~mask[0], -1) for one, mask in zip(pos, masks, strict=True)]
    return attend(q, table_of(heads, holes, has_holes=True), scale, softcap)


def attend(
    q: Tensor, table: PackedTable, scale: float, softcap: float, at: Tensor | None = None, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute q [H, N, D] -> out [H, N, D], lse [H, N], float32. `window`: positions seen by rows at positions `at`."""
    (h, n, d), kv = q.shape, len(table.at)
    unit, g = UNIT if n <= MANY else WHOLE, h // kv
    spans = n_spans(table.room, unit)
    parts, lses = (torch.empty(h, n, spans, *more, dtype=torch.float32, device=q.device) for more in ((d,), ()))
    tile = 16 if g * n <= 16 else 32
    by, cap = (2 * LOG2E * scale / softcap, LOG2E * softcap) if softcap > 0 else (LOG2E * scale, 0.0)
    packed_kernel[(kv, spans, triton.cdiv(g * n, tile))](
        q.contiguous(), table.at, table.at if at is None else at, parts, lses, by, cap, window, n, spans,
        UNIT=unit, G=g, D=d, M=tile, B=table.tile, K_BITS=table.k_bits, V_BITS=table.v_bits, GROUP=table.group,
        C=table.width, HAS_CAP=softcap > 0, SIGHT=2 if window else 1 if table.has_holes else 0,
        BF16=table.dtype == torch.bfloat16, PTX=q.is_cuda,
        num_stages=triton_support.tiles_under_way(q.device), **OPTIONS,
    )  # fmt: skip
    out, lse = torch.empty_like(q, dtype=torch.float32), lses.new_empty(h, n)
    meet_kernel[(h, n)](parts, lses, out, lse, spans, D=d, num_stages=2, **OPTIONS)
    return out, lse


@triton.jit
def _narrow(x):
    """Convert any float dtype to float16, clipped as stored scales are."""
    return tl.minimum(tl.maximum(x.to(tl.float32), -LARGEST), LARGEST).to(tl.float16)


@triton.jit
def _halves(x):
    """Return the two float16 in 32 bits."""
    low = (x & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, (x >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _two(code, scale, zero, BITS: tl.constexpr, FIRST: tl.constexpr, PTX: tl.constexpr):
    """Dequantize codes FIRST, FIRST + 1 of each byte: code [B, X], scale, zero as pairs -> two [B, X] float16."""
    code, scale = tl.broadcast(code, scale)
    code, zero = tl.broadcast(code, zero)
    if PTX:
        asm: tl.constexpr = PTX_4 if BITS == 4 else PTX_2 if FIRST == 0 else PTX_2_BEHIND
        regs: tl.constexpr = "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r"
        x = tl.inline_asm_elementwise(asm, regs, [code, scale, zero], tl.uint32, is_pure=True, pack=4)
        x0, x1 = _halves(x)
    else:
        s0, s1 = _halves(scale)
        z0, z1 = _halves(zero)
        most: tl.constexpr = (1 << BITS) - 1
        x0 = tl.fma(((code >> BITS * FIRST) & most).to(tl.float16), s0, z0)
        x1 = tl.fma(((code >> BITS * (FIRST + 1)) & most).to(tl.float16), s1, z1)
    return x0, x1


@triton.jit
def _spread(code, scale, zero, scale_2, zero_2, BITS: tl.constexpr, PTX: tl.constexpr):
    """Dequantize code [B, X] -> numbers [B, X * 8 / BITS] in channel order; `_2`: for the third and fourth number."""
    x0, x1 = _two(code, scale, zero, BITS, 0, PTX)
    if BITS == 4:
        x = tl.join(x0, x1)
    else:
        x2, x3 = _two(code, scale_2, zero_2, BITS, 2, PTX)
        x = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return tl.reshape(x, [code.shape[0], code.shape[1] * (8 // BITS)])


@triton.jit
def _bytes(code, PTX: tl.constexpr):
    """Convert int8 -> float16."""
    if PTX:
        x = tl.inline_asm_elementwise(PTX_8, "=r,=r,r", [code], tl.float16, is_pure=True, pack=4)
    else:
        x = code.to(tl.int8, bitcast=True).to(tl.float16)
    return x


@triton.jit
def _load(p, m, EDGE: tl.constexpr):
    """Load a tile. Whole tiles are loaded without a mask, which would cost an instruction per load."""
    return tl.load(p, mask=m, other=0) if EDGE else tl.load(p)


@triton.jit
def _scores(q, p_code, p_scale, p_zero, b, m_slot, BITS: tl.constexpr, GROUP: tl.constexpr, B: tl.constexpr,
            D: tl.constexpr, EDGE: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Multiply q [M, D] and the quantized keys of slots b .. b + B - 1 -> [M, B]."""
    i_slot, row = tl.arange(0, B), b.to(tl.int64)
    x: tl.constexpr = D * BITS // 8
    code = _load(p_code + row * x + i_slot[:, None] * x + tl.arange(0, x)[None, :], m_slot[:, None], EDGE)  # [B, X]
    if BITS == 8:
        scale = _load(p_scale + row + i_slot, m_slot, EDGE).to(tl.float32)  # [B]
        score = tl.dot(q, tl.trans(_bytes(code, PTX))) * scale[None, :]
    else:
        i_pair = row // GROUP * (D // 2) + tl.arange(0, x) * (4 // BITS)
        at_scale = p_scale.to(tl.pointer_type(tl.uint32)) + i_pair
        at_zero = p_zero.to(tl.pointer_type(tl.uint32)) + i_pair
        scale, zero = tl.load(at_scale)[None, :], tl.load(at_zero)[None, :]  # [1, X], of two channels each
        more: tl.constexpr = 2 // BITS  # a byte of 2-bit codes has two more channels
        k = _spread(code, scale, zero, tl.load(at_scale + more)[None, :], tl.load(at_zero + more)[None, :], BITS, PTX)
        score = tl.dot(q, tl.trans(k))
    return score


@triton.jit
def _twice(x, B: tl.constexpr, N: tl.constexpr, X: tl.constexpr):
    """Expand x [B, N] float16, one per group of a slot -> pairs [B, X], one per byte."""
    x = x.to(tl.uint16, bitcast=True).to(tl.uint32)
    return tl.reshape(tl.broadcast_to((x | x << 16)[:, :, None], [B, N, X // N]), [B, X])


@triton.jit
def _values(p_code, p_scale, p_zero, b, room, m_slot, BITS: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
            D: tl.constexpr, EDGE: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Dequantize the values [B, D] of slots b .. b + B - 1."""
    i_slot, row = tl.arange(0, B), b.to(tl.int64)
    x: tl.constexpr = D * BITS // 8
    n: tl.constexpr = D // C
    if BITS == 8:
        i_code = tl.arange(0, D).to(tl.int64)[None, :] * room + row + i_slot[:, None]  # stored transposed
        m_room = row + i_slot < room  # zeros up to a multiple of 16, so that sixteen are read at once
        scale = _load(p_scale + row + i_slot, m_room, EDGE)  # [B]
        v = _bytes(_load(p_code + i_code, m_room[:, None], EDGE), PTX) * scale[:, None]
    else:
        code = _load(p_code + row * x + i_slot[:, None] * x + tl.arange(0, x)[None, :], m_slot[:, None], EDGE)  # [B, X]
        i_scale = row * n + i_slot[:, None] * n + tl.arange(0, n)[None, :]
        scale = _twice(_load(p_scale + i_scale, m_slot[:, None], EDGE), B, n, x)
        zero = _twice(_load(p_zero + i_scale, m_slot[:, None], EDGE), B, n, x)
        v = _spread(code, scale, zero, scale, zero, BITS, PTX)
    return v


@triton.jit
def _full(p, b, m_slot, B: tl.constexpr, D: tl.constexpr, EDGE: tl.constexpr):
    """Load numbers [B, D] stored in full precision."""
    i = b.to(tl.int64) * D + tl.arange(0, B)[:, None] * D + tl.arange(0, D)[None, :]
    return _narrow(_load(p + i, m_slot[:, None], EDGE))


@triton.jit
def _update(score, v, m_seen, base, mass, acc, by, cap, HAS_CAP: tl.constexpr, ALL: tl.constexpr):
    """Add a tile to the state of M rows: score [M, B] before scaling, v [B, D], m_seen [.., B], mass [M, B]."""
    score = score * by
    if HAS_CAP:  # tanh by exp2; `by` makes the score its argument
        e = tl.exp2(-tl.abs(score))
        bent = (1.0 - e) / (1.0 + e) * cap
        score = tl.where(score < 0, -bent, bent)
    if not ALL:
        score = tl.where(m_seen, score, float("-inf"))
    new = tl.maximum(base, tl.max(score, 1) - ABOVE)
    one = new if ALL else tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(score - one[:, None])
    shrink = tl.exp2(base - one)[:, None]
    # each column has its own sum, because sums over a tile would cross threads and make them wait
    return new, mass * shrink + p, tl.dot(p.to(tl.float16), v, acc * shrink)


@triton.jit(do_not_specialize=["window", "n_rows", "n_spans"])
def packed_kernel(
    p_q, p_table, p_at, p_out, p_lse, by, cap, window, n_rows, n_spans, UNIT: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, B: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr,
    GROUP: tl.constexpr, C: tl.constexpr, HAS_CAP: tl.constexpr, SIGHT: tl.constexpr, BF16: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Compute spans of rows; grid (K, spans, blocks of M rows). SIGHT: rows see all slots (0), all but holes (1), or
    those in a window (2). BF16: dtype of unquantized numbers."""
    head, part = tl.program_id(0), tl.program_id(1)
    row = p_table + head * 11
    k_type: tl.constexpr = tl.pointer_type(tl.uint8)
    scale_type: tl.constexpr = tl.pointer_type(tl.float16)
    full_type: tl.constexpr = tl.pointer_type(tl.bfloat16 if BF16 else tl.float16)
    k_code = tl.multiple_of(tl.load(row).to(k_type), 16)
    k_scale = tl.multiple_of(tl.load(row + 1).to(scale_type), 16)
    k_zero = tl.multiple_of(tl.load(row + 2).to(scale_type), 16)
    v_code = tl.multiple_of(tl.load(row + 3).to(k_type), 16)
    v_scale = tl.multiple_of(tl.load(row + 4).to(scale_type), 16)
    v_zero = tl.multiple_of(tl.load(row + 5).to(scale_type), 16)
    rest = tl.multiple_of(tl.load(row + 6).to(full_type), 16)
    p_pos = tl.load(row + 7).to(tl.pointer_type(tl.int32))
    packed, length = tl.load(row + 8).to(tl.int32), tl.load(row + 9).to(tl.int32)
    room = tl.multiple_of(tl.load(row + 10), 16)

    r = tl.program_id(2) * M + tl.arange(0, M)
    n, h = r // G, head * G + r % G
    live = n < n_rows
    i_row = h.to(tl.int64) * n_rows + n
    i_dim = tl.arange(0, D)
    q = _narrow(tl.load(p_q + i_row[:, None] * D + i_dim[None, :], mask=live[:, None], other=0.0))  # [M, D]
    since = tl.zeros([M], tl.int32)
    if SIGHT == 2:
        since = tl.load(p_at + n, mask=live, other=0) - window  # [M]
    base = tl.full([M], float("-inf"), tl.float32)  # score that weights are relative to
    mass = tl.zeros([M, B], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    i_slot = tl.arange(0, B)

    first, last = first_of(part, UNIT), tl.minimum(first_of(part + 1, UNIT), length)
    if first >= length:  # room without slots
        tl.store(p_lse + i_row * n_spans + part, tl.full([M], float("-inf"), tl.float32), mask=live)
        return
    whole = length // B * B
    if K_BITS < 8:
        whole = packed
    for b in range(first, tl.minimum(last, whole), B):
        b = tl.multiple_of(b, 16)
        m_slot = i_slot >= 0
        m_seen = m_slot[None, :]
        if SIGHT > 0:
            pos = tl.load(p_pos + b + i_slot)[None, :]  # [1, B]
            m_seen = (pos >= 0) & ((pos > since[:, None]) | (SIGHT == 1))
        if K_BITS == 16:
            score = tl.dot(q, tl.trans(_full(rest, b, m_slot, B, D, False)))
        else:
            score = _scores(q, k_code, k_scale, k_zero, b, m_slot, K_BITS, GROUP, B, D, False, PTX)
        if V_BITS == 16:
            v = _full(v_code.to(full_type), b, m_slot, B, D, False)
        else:
            v = _values(v_code, v_scale, v_zero, b, room, m_slot, V_BITS, C, B, D, False, PTX)
        base, mass, acc = _update(score, v, m_seen, base, mass, acc, by, cap, HAS_CAP, SIGHT == 0)
    for b in range(tl.maximum(first, whole), last, B):  # less than a tile, or keys that are not quantized yet
        b = tl.multiple_of(b, 16)
        m_slot = b + i_slot < length
        m_seen = m_slot[None, :]
        if SIGHT > 0:
            pos = tl.load(p_pos + b + i_slot, mask=m_slot, other=-1)[None, :]
            m_seen = (pos >= 0) & ((pos > since[:, None]) | (SIGHT == 1))
        if K_BITS == 8:
            score = _scores(q, k_code, k_scale, k_zero, b, m_slot, K_BITS, GROUP, B, D, True, PTX)
        else:
            score = tl.dot(q, tl.trans(_full(rest, b - packed, m_slot, B, D, True)))
        if V_BITS == 16:
            v = _full(v_code.to(full_type), b, m_slot, B, D, True)
        else:
            v = _values(v_code, v_scale, v_zero, b, room, m_slot, V_BITS, C, B, D, True, PTX)
        base, mass, acc = _update(score, v, m_seen, base, mass, acc, by, cap, HAS_CAP, False)

    total = tl.sum(mass, 1)
    some = tl.where(total > 0, total, 1.0)
    i_part = i_row * n_spans + part
    tl.store(p_out + i_part[:, None] * D + i_dim[None, :], acc / some[:, None], mask=live[:, None])
    tl.store(p_lse + i_part, tl.where(total > 0, base + tl.log2(some), float("-inf")), mask=live)


@triton.jit(do_not_specialize=["n_spans"])
def meet_kernel(p_part, p_lses, p_out, p_lse, n_spans, D: tl.constexpr):
    """Merge the spans of a row in order, sixteen at a time; grid (H, N). Their lse is to base 2."""
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    i_span, i_dim = tl.arange(0, MEETING), tl.arange(0, D)
    top = tl.full([MEETING], float("-inf"), tl.float32)
    for s in range(0, n_spans, MEETING):
        m = s + i_span < n_spans
        top = tl.maximum(top, tl.load(p_lses + row * n_spans + s + i_span, mask=m, other=float("-inf")))  # [S]
    most = tl.max(top, 0)
    safe = tl.where(most == float("-inf"), 0.0, most)
    mass, acc = tl.zeros([MEETING], tl.float32), tl.zeros([MEETING, D], tl.float32)
    for s in range(0, n_spans, MEETING):
        m, i = s + i_span < n_spans, row * n_spans + s + i_span
        w = tl.exp2(tl.load(p_lses + i, mask=m, other=float("-inf")) - safe)  # [S]
        m_read = (w > 0)[:, None]  # what has no slots was not written
        acc += w[:, None] * tl.load(p_part + i[:, None] * D + i_dim[None, :], mask=m_read, other=0.0)  # [S, D]
        mass += w
    total = tl.sum(mass, 0)
    some = tl.where(total > 0, total, 1.0)
    tl.store(p_out + row * D + i_dim, tl.sum(acc, 0) / some)
    tl.store(p_lse + row, tl.where(total > 0, (most + tl.log2(some)) * LN2, float("-inf")))
