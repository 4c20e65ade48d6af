"""Attention mass per slot in Triton: one pass over the keys for each row's log-sum-exp, another for the masses.

The second pass sums a tile of slots over all rows in order. No tensor of rows x slots is written unless requested.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, SLOTS = 32, 64  # per product
SPAN = 4096  # slots per program of `lse_kernel`
LOG2E = 1.4426950408889634
FOLDS = {"none": 0, "sum": 1, "mean": 1, "max": 2}
NUMBERS = ["window", "w", "s", "pos_head", "pos_slot"]  # these change as a sequence grows
OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}


def attention_mass(
    q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, scale: float, softcap: float, window: int | None, over: str
) -> Tensor:
    """Compute as the reference; q [H, w, D] and k [K, S, D] of one 16-bit dtype, D a power of two from 64 to 256."""
    (h, w, d), (kv, s) = q.shape, pos.shape
    g = h // kv
    out = torch.empty((kv, g, w, s) if over == "none" else (kv, s), dtype=torch.float32, device=k.device)
    if not w or not s:
        return out.zero_()
    q, k = q.contiguous(), k if k.stride(2) == 1 else k.contiguous()
    spans = triton.cdiv(s, SPAN)
    lse = out.new_empty(h, w, spans)
    by, cap = (2 * LOG2E * scale / softcap, LOG2E * softcap) if softcap > 0 else (LOG2E * scale, 0.0)
    given = q, q_pos, k, pos, by, cap, window or 0, w, s, *k.stride()[:2], *pos.stride()
    consts = {"G": g, "D": d, "M": ROWS, "B": SLOTS, "HAS_CAP": softcap > 0, "HAS_WINDOW": window is not None}
    lse_kernel[(h, triton.cdiv(w, ROWS), spans)](*given, lse, SPAN=SPAN, **consts, **OPTIONS)
    total = torch.logsumexp(lse / LOG2E, -1).mul_(LOG2E)  # -inf for a row that sees no slot
    share = 1.0 / (g * w) if over == "mean" else 1.0 / g
    mass_kernel[(triton.cdiv(s, SLOTS), kv)](*given, total, out, share, FOLD=FOLDS[over], **consts, **OPTIONS)
    return out


@triton.jit
def _scores(
    q, p_k, p_pos, at, i_slot, by, cap, window, s, k_slot, pos_slot,
    D: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Score rows q [M, D] at positions [M] over slots [B] -> [M, B], to base 2, -inf for slots outside a row's view."""
    there = i_slot < s
    pos = tl.load(p_pos + i_slot.to(tl.int64) * pos_slot, mask=there, other=-1)[None, :]
    i_key = i_slot.to(tl.int64)[:, None] * k_slot + tl.arange(0, D)[None, :]
    k = tl.load(p_k + i_key, mask=there[:, None], other=0.0)  # [B, D]
    score = tl.dot(q, tl.trans(k)) * by
    if HAS_CAP:  # tanh by exp2; `by` makes the score its argument
        e = tl.exp2(-tl.abs(score))
        bent = (1.0 - e) / (1.0 + e) * cap
        score = tl.where(score < 0, -bent, bent)
    sees = (pos >= 0) & (pos <= at[:, None])
    if HAS_WINDOW:
        sees = sees & (pos > at[:, None] - window)
    return tl.where(sees, score, float("-inf"))


@triton.jit(do_not_specialize=NUMBERS)
def lse_kernel(
    p_q, p_at, p_k, p_pos, by, cap, window, w, s, k_head, k_slot, pos_head, pos_slot, p_lse, G: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, B: tl.constexpr, SPAN: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Compute each row's log-sum-exp per span, to base 2; grid (H, blocks of M rows, spans)."""
    h, span = tl.program_id(0).to(tl.int64), tl.program_id(2)
    n = tl.program_id(1) * M + tl.arange(0, M)
    live = n < w
    at = tl.load(p_at + n, mask=live, other=-1)
    q = tl.load(p_q + (h * w + n)[:, None] * D + tl.arange(0, D)[None, :], mask=live[:, None], other=0.0)  # [M, D]
    p_k += h // G * k_head
    p_pos += h // G * pos_head
    top, mass = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    for b in range(span * SPAN, tl.minimum((span + 1) * SPAN, s), B):
        i_slot = b + tl.arange(0, B)
        score = _scores(q, p_k, p_pos, at, i_slot, by, cap, window, s, k_slot, pos_slot, D, HAS_CAP, HAS_WINDOW)
        new = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        mass = mass * tl.exp2(top - safe) + tl.sum(tl.exp2(score - safe[:, None]), 1)
        top = new
    found = tl.where(mass > 0, top + tl.log2(tl.where(mass > 0, mass, 1.0)), float("-inf"))
    tl.store(p_lse + (h * w + n) * tl.num_programs(2) + span, found, mask=live)


@triton.jit(do_not_specialize=NUMBERS)
def mass_kernel(
    p_q, p_at, p_k, p_pos, by, cap, window, w, s, k_head, k_slot, pos_head, pos_slot, p_lse, p_out, share,
    G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, B: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Compute masses; grid (blocks of B slots, K). FOLD 0: every row's masses; 1: sum times `share`; 2: maximum."""
    head = tl.program_id(1).to(tl.int64)
    i_slot = tl.program_id(0) * B + tl.arange(0, B)
    there = i_slot < s
    p_k += head * k_head
    p_pos += head * pos_head
    total = tl.zeros([B], tl.float32)
    for h in range(head * G, (head + 1) * G):
        for first in range(0, w, M):
            n = first + tl.arange(0, M)
            live = n < w
            row = h * w + n
            at = tl.load(p_at + n, mask=live, other=-1)
            q = tl.load(p_q + row[:, None] * D + tl.arange(0, D)[None, :], mask=live[:, None], other=0.0)  # [M, D]
            lse = tl.load(p_lse + row, mask=live, other=0.0)
            lse = tl.where(lse == float("-inf"), 0.0, lse)  # the row sees no slot: its scores are -inf as well
            score = _scores(q, p_k, p_pos, at, i_slot, by, cap, window, s, k_slot, pos_slot, D, HAS_CAP, HAS_WINDOW)
            mass = tl.exp2(score - lse[:, None])  # [M, B]; 0 in rows out of bounds, which see no slot
            if FOLD == 0:
                tl.store(p_out + row[:, None] * s + i_slot[None, :], mass, mask=live[:, None] & there[None, :])
            elif FOLD == 1:
                total += tl.sum(mass, 0)
            else:
                total = tl.maximum(total, tl.max(mass, 0))
    if FOLD > 0:
        tl.store(p_out + head * s + i_slot, total * share if FOLD == 1 else total, mask=there)
