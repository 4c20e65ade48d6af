"""TurboQuant: keys and values in a random rotation, where each number is rounded to the best levels for normal noise.

A rotated vector's numbers are distributed alike, nearly normally, whatever the vector was. So one table of levels
serves all of them and none is measured; a slot stores its length and no other scale. The rotation is a fixed change of
signs and a Hadamard transform. The paper's second stage, one bit for the sign of what is left, is not built: it makes
single dot products unbiased at the cost of a bit, and attention sums many.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvcli.kernels.quantize_kv import spread, squeeze
from kvcli.kv.formats.block_format import BlockFormat
from kvcli.kv.formats.format import TINIEST, Codes, to_16_bit
from kvcli.methods.formats.rotatekv import hadamard, refuse_odd_sizes

if TYPE_CHECKING:
    from kvcli.kv.slots import LayerShape
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class TurboQuant(BlockFormat):
    """TurboQuant (Zandieh et al., 2025, arXiv 2504.19874): a random rotation, then the best levels for normal noise.

    In 2 + 2 bits, the KV takes 1.19 MiB and the demo's accuracy is 0.948, as of `kivi` (measurements/lab-log.md).
    """

    own: ClassVar = {"kv.rotate": "which rotates keys, as this KV format does already"}

    def refuse(self, shape: LayerShape, kv: Kv) -> None:
        super().refuse(shape, kv)
        refuse_odd_sizes(shape, "turboquant")

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        return *_coded(k, kv.k_bits), *_coded(v, kv.v_bits)

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        return _decoded(codes[:2], kv.k_bits, exact), _decoded(codes[2:], kv.v_bits, exact)


def _coded(x: Tensor, bits: int) -> Codes:
    """Return the codes of x [.., D] and its lengths [..]."""
    length = x.square().sum(-1).sqrt()
    noise = hadamard(x * _signs(x)) * (x.shape[-1] ** 0.5 / length.clamp_min(TINIEST).unsqueeze(-1))
    levels = x.new_tensor(normal_levels(bits))
    codes = torch.bucketize(noise, (levels[1:] + levels[:-1]) / 2)
    return squeeze(codes.to(torch.uint8), bits), to_16_bit(length)


def _decoded(of: Codes, bits: int, exact: torch.dtype) -> Tensor:
    codes, length = of
    noise = torch.tensor(normal_levels(bits), dtype=exact, device=codes.device)[spread(codes, bits).long()]
    return hadamard(noise * (length.to(exact) * noise.shape[-1] ** -0.5).unsqueeze(-1)) * _signs(noise)


def _signs(x: Tensor) -> Tensor:
    """Return a fixed random sign for each channel of x [.., D]."""
    drawn = torch.randint(0, 2, x.shape[-1:], generator=torch.Generator().manual_seed(x.shape[-1]))
    return (2 * drawn - 1).to(x.device, x.dtype)


@lru_cache(maxsize=8)
def normal_levels(bits: int) -> tuple[float, ...]:
    """Return the 2^bits levels with the least mean square error for normal noise, ascending (Max, 1960)."""
    normal, n = NormalDist(), 1 << bits
    levels = [NormalDist(0, 3**0.5).inv_cdf((i + 0.5) / n) for i in range(n)]  # nearly right for many levels
    for _ in range(100):
        cuts = [-float("inf"), *((a + b) / 2 for a, b in pairwise(levels)), float("inf")]
        levels = [(normal.pdf(a) - normal.pdf(b)) / (normal.cdf(b) - normal.cdf(a)) for a, b in pairwise(cuts)]
    return tuple(levels)
