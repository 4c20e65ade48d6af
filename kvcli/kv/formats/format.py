"""KV format protocol: how old slots are stored, chosen by `kv_format.method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from kvcli.errors import BadModel
from kvcli.kernels.quantize_kv import round_range, spread, squeeze, width_of
from kvcli.kernels.rope import Rotary
from kvcli.kv.slots import AttentionParams, LayerShape

if TYPE_CHECKING:
    from kvcli.kv.sparse.page_source import PageTier
    from kvcli.settings.schema import Kv

# Quantization functions that KV formats share (KIVI, arXiv 2402.02750).


LARGEST, TINIEST = 65504.0, 2.0**-24  # largest and smallest positive float16


def quantize(x: Tensor, bits: int, dim: int) -> Codes:
    """Quantize x [.., D] along `dim` to codes [.., D * bits / 8], scale and zero of size 1 in that dimension."""
    codes, scale, zero = round_range(x, bits, dim)
    return squeeze(codes, bits), scale, zero


def dequantize(of: Codes, bits: int, exact: torch.dtype) -> Tensor:
    """Dequantize to the type `exact`."""
    codes, scale, zero = of
    return zero.to(exact) + spread(codes, bits).to(exact) * scale.to(exact)


def by_slot(v: Tensor, bits: int, group: int) -> Codes:
    """Quantize values [.., E] per slot in groups of at most `group` channels."""
    codes, scale, zero = round_range(grouped(v, v.shape[-1] // width_of(v.shape[-1], group)), bits, -1)
    return squeeze(codes.flatten(-2), bits), scale.squeeze(-1), zero.squeeze(-1)


def of_slots(of: Codes, bits: int, exact: torch.dtype) -> Tensor:
    """Dequantize the result of `by_slot`."""
    codes, scale, zero = of
    q = grouped(spread(codes, bits).to(exact), scale.shape[-1])
    return (zero.to(exact).unsqueeze(-1) + q * scale.to(exact).unsqueeze(-1)).flatten(-2)


def grouped(x: Tensor, groups: int) -> Tensor:
    """Reshape x [.., D] to [.., groups, D / groups]."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def split_outliers(x: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split x [.., m] into x clamped to the range of the inliers, and its n largest and n smallest elements.

    Outliers are returned as indices [.., 2 n] and 16-bit elements.
    """
    high, low = x.topk(n + 1, -1), x.topk(n + 1, -1, largest=False)
    at = torch.cat([high.indices[..., :n], low.indices[..., :n]], -1)
    found = torch.cat([high.values[..., :n], low.values[..., :n]], -1)
    inner = x.minimum(high.values[..., n:]).maximum(low.values[..., n:])
    return inner, placed(at, x.shape[-1]), to_16_bit(found)


def merge_outliers(x: Tensor, at: Tensor, found: Tensor) -> Tensor:
    """Write outliers back into x."""
    return x.scatter(-1, at.long(), found.to(x.dtype))


def placed(at: Tensor, n: int) -> Tensor:
    """Convert indices below n to the smallest sufficient integer type."""
    return at.to(torch.uint8 if n <= 1 << 8 else torch.int16 if n <= 1 << 15 else torch.int32)


def to_16_bit(x: Tensor) -> Tensor:
    """Convert to float16, clamped to its range."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float16)


def singular_vectors(x: Tensor, rank: int) -> Tensor:
    """Return the first `rank` right singular vectors [.., r, n] of x [.., m, n], the largest first.

    Raises BadModel if x is not finite.
    """
    m, n = x.shape[-2:]
    if m <= n:  # from the eigenvectors of the smaller of two products
        way = eigenvectors(x @ x.mT).flip(-1)[..., :rank].mT @ x
        # if x has a lower rank (equal rows), the other vectors are noise along the first
        found: Tensor = torch.linalg.qr(way.mT).Q.mT
    else:
        found = eigenvectors(x.mT @ x).flip(-1)[..., :rank].mT
    return found


def low_rank_factors(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors [B, .., r, m] and [B, .., r, n] of the best approximation of this rank of x [B, .., m, n]."""
    # block by block, because rounding of batched products and eigenvectors depends on the number of blocks
    ways = [singular_vectors(block, rank) for block in x]
    shares = [way @ block.mT for way, block in zip(ways, x, strict=True)]
    return to_16_bit(torch.stack(shares)), to_16_bit(torch.stack(ways))


def product(a: Tensor, b: Tensor, exact: torch.dtype) -> Tensor:
    """Multiply a [.., r, m] and b [.., r, n] to [.., m, n], one rank at a time, so that it is batch invariant."""
    of = max(a.shape[:-2], b.shape[:-2], key=len)  # one factor may be shared by all blocks
    out = torch.zeros(*of, a.shape[-1], b.shape[-1], dtype=exact, device=a.device)
    for x, y in zip(a.to(exact).unbind(-2), b.to(exact).unbind(-2), strict=True):
        out += x.unsqueeze(-1) * y.unsqueeze(-2)
    return out


# Eigenvectors of products of keys or values, with a check that these are finite.


def eigenvectors(x: Tensor) -> Tensor:
    """Return eigenvectors of symmetric x [.., n, n] as columns, largest last. Raises BadModel if x is not finite."""
    # LAPACK reports no error for NaN at most sizes
    if not x.is_meta and not bool(x.isfinite().all()):
        raise BadModel(
            "the model's keys or values are not numbers",
            code="bad_slots",
            lines=["this KV format needs singular vectors, which NaN or infinity do not have"],
            try_=["--set load.dtype=fp32", "download the model again: its weights may be damaged"],
        )
    found: Tensor = torch.linalg.eigh(x).eigenvectors
    return found


@dataclass(frozen=True)
class FormatContext:
    """Properties of the model that a KV format may use."""

    shapes: Sequence[LayerShape]  # by layer; a layer that reads another layer's slots stores none
    dtype: torch.dtype  # data type of given slots and of dequantized slots
    attention_params: Sequence[AttentionParams]  # by layer
    # rotary embeddings by layer; raises BadModel if they are not a fixed table
    turns: Callable[[], Sequence[Rotary | None]]


class KVFormat(Protocol):
    """A KV format: a frozen dataclass whose fields are the keys of `[kv_format]`."""

    def is_active(self, kv: Kv) -> bool:
        """True if these settings store slots in this format."""

    def unsupported_keys(self, kv: Kv) -> Mapping[str, str]:
        """Return keys of `[kv]` that the format does not support, with reasons. `tier` checks the model."""

    def tier(self, of: FormatContext, device: torch.device, kv: Kv) -> PageTier:
        """Return an empty tier. Raises BadConfig or BadModel if the model is not supported."""

    def nbytes(self, shape: LayerShape, kv: Kv, number: int) -> int:
        """Return bytes of a slot of all heads with its position; `number`: bytes of an element in full precision."""


Codes: TypeAlias = tuple[Tensor, ...]  # [B, ..] each: B blocks, whose sizes depend on the settings and the model alone


class BlockFunctions(Protocol):
    """The pair of functions by which `BlockTier` writes and reads blocks of slots."""

    @property
    def rope(self) -> Literal["after", "before"]:
        """Stage at which keys are quantized: after or before the rotary embedding."""

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        """Quantize k [B, h, g, D] and v [B, h, g, E], in float32 or wider."""

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        """Dequantize to k [B, h, g, D] and v [B, h, g, E] of type `exact`, for `dims` (D, E)."""

    def heads(self, n: int) -> int:
        """Return how many of n KV heads are quantized together."""

    def refuse(self, shape: LayerShape, kv: Kv) -> None:
        """Raise BadConfig for slots of a shape that the format cannot hold."""
