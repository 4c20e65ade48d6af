"""Mustafar: keys and values without their smallest numbers, stored as a bitmap and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from torch import Tensor

from kvcli.kernels.quantize_kv import spread, squeeze
from kvcli.kv.formats.block_format import BlockFormat
from kvcli.kv.formats.format import Codes, to_16_bit
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class Mustafar(BlockFormat):
    """Mustafar (2025, arXiv 2505.22913): the largest elements of each key and value, with a bitmap of their channels.

    With 50% of the elements, the KV takes 3.52 MiB and the demo model's accuracy falls by 0 (measurements/kv-cache.md).
    """

    k_sparsity: Annotated[float, Range(0, below=1)] = 0.5  # share of key elements dropped, the smallest
    v_sparsity: Annotated[float, Range(0, below=1)] = 0.5  # share of value elements dropped, the smallest

    own: ClassVar = {"kv.rotate": "which spreads the large values that this KV format keeps over all channels"}
    rounds = False

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        return *_mapped(k, self.k_sparsity), *_mapped(v, self.v_sparsity)

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        return _spread(codes[:2], dims[0], exact), _spread(codes[2:], dims[1], exact)


def _mapped(x: Tensor, sparsity: float) -> Codes:
    """Sparsify x [.., D] -> a bitmap in bytes [.., D / 8], and the n kept numbers in order [.., n]."""
    n = max(1, x.shape[-1] - round(sparsity * x.shape[-1]))
    at = x.abs().topk(n, -1).indices.sort(-1).values
    stands = x.new_zeros(*x.shape[:-1], -(-x.shape[-1] // 8) * 8, dtype=torch.uint8)
    return squeeze(stands.scatter(-1, at, 1), 1), to_16_bit(x.gather(-1, at))


def _spread(of: Codes, dim: int, exact: torch.dtype) -> Tensor:
    """Invert `_mapped`, with 0 for the dropped numbers."""
    stands = spread(of[0], 1)[..., :dim].bool()
    return torch.zeros(stands.shape, dtype=exact, device=stands.device).masked_scatter_(stands, of[1].to(exact))
