"""Highest score of each row in Triton: first in pieces of the vocabulary, then among the results of the pieces."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcli.kernels.argmax.reference import Noise
from kvcli.kernels.gumbel_noise.reference import GOLDEN, MIX1, MIX2

PIECE = 1024  # tokens per program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_GOLDEN, _MIX1, _MIX2 = tl.constexpr(GOLDEN), tl.constexpr(MIX1), tl.constexpr(MIX2)
NOTHING = tl.constexpr(1 << 30)  # larger than any id


def argmax(logits: Tensor, noise: Noise | None = None) -> Tensor:
    """Compute logits [N, V] -> ids [N] int32, -1 = not finite."""
    logits = logits.contiguous()
    n, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    scores = logits.new_empty(n, pieces, dtype=torch.float32 if noise is None else torch.float64)
    found, ids = logits.new_empty(n, pieces, dtype=torch.int32), logits.new_empty(n, dtype=torch.int32)
    by = (logits, logits, logits) if noise is None else (noise.seed, noise.pos, noise.heat)
    pieces_kernel[(pieces, n)](
        logits, *by, scores, found, vocab, PIECES=pieces, PIECE=PIECE, DRAWS=noise is not None, **OPTIONS
    )
    row_kernel[(n,)](scores, found, ids, PIECES=pieces, BLOCK=triton.next_power_of_2(pieces), **OPTIONS)
    return ids


@triton.jit
def pieces_kernel(
    p_logits, p_seed, p_pos, p_heat, p_scores, p_found, V,
    PIECES: tl.constexpr, PIECE: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """Find the highest score of one piece of a row and its id, [N, PIECES] each; grid (PIECES, N)."""
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_v = piece * PIECE + tl.arange(0, PIECE)
    b_s = tl.load(p_logits + row * V + i_v, mask=i_v < V, other=float("-inf")).to(tl.float32)  # [PIECE]
    if DRAWS:
        key = _splitmix(_splitmix(tl.load(p_seed + row)) ^ tl.load(p_pos + row))
        b_bits = _splitmix(key ^ _splitmix(i_v.to(tl.int64)))
        b_u = (_shift(b_bits, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52
        b_s = tl.div_rn(b_s, tl.load(p_heat + row)).to(tl.float64) - tl.log(-tl.log(b_u))
    b_s = tl.where(b_s != b_s, float("inf"), b_s)  # NaN becomes the highest score, which is then not finite
    best, at = _highest(b_s, tl.where(i_v < V, i_v, NOTHING))
    tl.store(p_scores + row * PIECES + piece, best)
    tl.store(p_found + row * PIECES + piece, at)


@triton.jit
def row_kernel(p_scores, p_found, p_ids, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Find the highest score of a row's pieces; grid (N,)."""
    row = tl.program_id(0).to(tl.int64)
    i_p = tl.arange(0, BLOCK)
    b_s = tl.load(p_scores + row * PIECES + i_p, mask=i_p < PIECES, other=float("-inf"))  # [BLOCK]
    b_at = tl.load(p_found + row * PIECES + i_p, mask=i_p < PIECES, other=NOTHING)
    best, at = _highest(b_s, b_at)
    tl.store(p_ids + row, tl.where(tl.abs(best) == float("inf"), -1, at))


@triton.jit
def _highest(b_s, b_at):
    """Return the highest score and the lowest id that has it, the same for any order of comparison."""
    best = tl.max(b_s, 0)
    return best, tl.min(tl.where(b_s == best, b_at, NOTHING), 0)


@triton.jit
def _splitmix(x):
    """The function of kernels/gumbel_noise/reference.py, in int64."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


@triton.jit
def _shift(x, BITS: tl.constexpr):
    """Shift right without the sign."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)
