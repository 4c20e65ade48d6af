"""Rounding that forms share: numbers in ranges of few bits, and back (KIVI, arXiv 2402.02750)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels.quantize_kv import round_range, spread, squeeze, width_of
from kvcli.kv.formats.eigen import eigenvectors
from kvcli.kv.formats.format import Codes

LARGEST, TINIEST = 65504.0, 2.0**-24  # of float16


def quantize(x: Tensor, bits: int, dim: int) -> Codes:
    """x [.., D] by ranges along `dim` -> codes [.., D * bits / 8], scale and zero with that dimension 1."""
    codes, scale, zero = round_range(x, bits, dim)
    return squeeze(codes, bits), scale, zero


def dequantize(of: Codes, bits: int, exact: torch.dtype) -> Tensor:
    """The inverse, but for rounding, in the type `exact`."""
    codes, scale, zero = of
    return zero.to(exact) + spread(codes, bits).to(exact) * scale.to(exact)


def by_slot(v: Tensor, bits: int, group: int) -> Codes:
    """Values [.., E] of each slot, by groups of at most `group` channels."""
    codes, scale, zero = round_range(grouped(v, v.shape[-1] // width_of(v.shape[-1], group)), bits, -1)
    return squeeze(codes.flatten(-2), bits), scale.squeeze(-1), zero.squeeze(-1)


def of_slots(of: Codes, bits: int, exact: torch.dtype) -> Tensor:
    """The inverse, but for rounding."""
    codes, scale, zero = of
    q = grouped(spread(codes, bits).to(exact), scale.shape[-1])
    return (zero.to(exact).unsqueeze(-1) + q * scale.to(exact).unsqueeze(-1)).flatten(-2)


def grouped(x: Tensor, groups: int) -> Tensor:
    """x [.., D] -> [.., groups, D / groups]."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def split_outliers(x: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [.., m] -> x within the range of the others, and the n largest and n smallest that are taken out of it.

    These as places [.., 2 n] and numbers in 16 bits.
    """
    high, low = x.topk(n + 1, -1), x.topk(n + 1, -1, largest=False)
    at = torch.cat([high.indices[..., :n], low.indices[..., :n]], -1)
    found = torch.cat([high.values[..., :n], low.values[..., :n]], -1)
    inner = x.minimum(high.values[..., n:]).maximum(low.values[..., n:])
    return inner, placed(at, x.shape[-1]), to_16_bit(found)


def merge_outliers(x: Tensor, at: Tensor, found: Tensor) -> Tensor:
    """The inverse, but for rounding."""
    return x.scatter(-1, at.long(), found.to(x.dtype))


def placed(at: Tensor, n: int) -> Tensor:
    """Places below n in as few bytes as hold them."""
    return at.to(torch.uint8 if n <= 1 << 8 else torch.int16 if n <= 1 << 15 else torch.int32)


def to_16_bit(x: Tensor) -> Tensor:
    """In 16 bits; what these cannot hold is clipped."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float16)


def singular_vectors(x: Tensor, rank: int) -> Tensor:
    """The main directions [.., r, n] of vectors x [.., m, n]: right singular vectors, the largest first.

    Raises BadModel where these are not finite.
    """
    m, n = x.shape[-2:]
    if m <= n:  # by the smaller of two products, whose eigenvectors they follow from
        way = eigenvectors(x @ x.mT).flip(-1)[..., :rank].mT @ x
        # where vectors have fewer directions, as equal ones do, the others are noise along the first
        found: Tensor = torch.linalg.qr(way.mT).Q.mT
    else:
        found = eigenvectors(x.mT @ x).flip(-1)[..., :rank].mT
    return found


def low_rank_factors(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Blocks x [B, .., m, n] -> the halves [B, .., r, m] and [B, .., r, n] of the best product of each of this rank."""
    # one by one: products, and eigenvectors, of a shape of their own for each number of blocks would round otherwise
    ways = [singular_vectors(block, rank) for block in x]
    shares = [way @ block.mT for way, block in zip(ways, x, strict=True)]
    return to_16_bit(torch.stack(shares)), to_16_bit(torch.stack(ways))


def product(a: Tensor, b: Tensor, exact: torch.dtype) -> Tensor:
    """a [.., r, m], b [.., r, n] -> [.., m, n], one rank after the other: sums that depend on nothing beside."""
    of = max(a.shape[:-2], b.shape[:-2], key=len)  # one may be the same for all
    out = torch.zeros(*of, a.shape[-1], b.shape[-1], dtype=exact, device=a.device)
    for x, y in zip(a.to(exact).unbind(-2), b.to(exact).unbind(-2), strict=True):
        out += x.unsqueeze(-1) * y.unsqueeze(-2)
    return out
