"""Counter-based Gumbel noise in plain PyTorch: two rounds of splitmix64 over (seed, position, token)."""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically; torch's shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix(x: Tensor) -> Tensor:
    """Apply one step of splitmix64 (Steele, Lea, Flood 2014); int64 arithmetic wraps as uint64 does."""
    x = x + GOLDEN
    x = (x ^ _shift(x, 30)) * MIX1
    x = (x ^ _shift(x, 27)) * MIX2
    return x ^ _shift(x, 31)


def signed(seed: int) -> int:
    """Return the same 64 bits as int64."""
    return (seed & 0xFFFFFFFFFFFFFFFF) - (1 << 64 if seed & (1 << 63) else 0)


def uniform(seed: int | Tensor, pos: Tensor, ids: Tensor) -> Tensor:
    """Return numbers u uniform on (0, 1) with 52 bits, never 0 or 1."""
    start = seed if isinstance(seed, Tensor) else torch.tensor(signed(seed), dtype=torch.int64).to(pos.device)
    key = _splitmix(_splitmix(start) ^ pos)  # [N]
    bits = _splitmix(key.unsqueeze(-1) ^ _splitmix(ids))  # [N, C]
    return (_shift(bits, 12).to(torch.float64) + 0.5) * 2.0**-52


def gumbel(seed: int | Tensor, pos: Tensor, ids: Tensor) -> Tensor:
    """Return noise -log(-log(u)) [N, C] float64 for pos [N] and ids [N, C] or [C], int64; a seed may be []."""
    return -torch.log(-torch.log(uniform(seed, pos, ids)))
