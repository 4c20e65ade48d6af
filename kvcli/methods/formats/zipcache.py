"""ZipCache: channel scales are divided out, then each token is quantized with one range.

The paper's two widths by saliency are left out: policy `budget` loses less (docs/measurements/kv-cache.md). With
`memory.evicted = "demote"` the slots that a policy drops get these bits, and the others are in full precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvcli.kv.formats.block_format import BlockFormat
from kvcli.kv.formats.format import LARGEST, Codes, dequantize, quantize

if TYPE_CHECKING:
    from kvcli.settings.schema import Kv

LEAST = 2.0**-14  # smallest channel scale: the smallest normal float16 number


@dataclass(frozen=True)
class ZipCache(BlockFormat):
    """ZipCache (2024, arXiv 2405.14256): channels scaled by their largest element, then one range per token.

    In 2 + 2 bits, the KV takes 1.35 MiB and the demo model's accuracy is 0.948 (measurements/kv-cache.md).
    """

    keys: Literal["channel", "separable"] = "channel"  # quantize keys per channel (paper), or per token as values

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        keys = quantize(k, kv.k_bits, -2) if self.keys == "channel" else separated(k, kv.k_bits)
        return *keys, *separated(v, kv.v_bits)

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, values = codes[:-4], codes[-4:]
        k = dequantize(keys, kv.k_bits, exact) if self.keys == "channel" else joined(keys, kv.k_bits, exact)
        return k, joined(values, kv.v_bits, exact)


def separated(x: Tensor, bits: int) -> Codes:
    """Quantize x [.., g, D] -> codes, scale, zero of slots [.., g, 1], and c = sqrt(max |x|) of channels [.., 1, D]."""
    c = x.abs().amax(-2, keepdim=True).sqrt().clamp(LEAST, LARGEST).to(torch.float16)
    return *quantize(x / c.to(x.dtype), bits, -1), c


def joined(of: Codes, bits: int, exact: torch.dtype) -> Tensor:
    """Invert `separated`, up to rounding."""
    return dequantize(of[:3], bits, exact) * of[3].to(exact)
