"""Scales of channels divided out, then one range for each slot (ZipCache, arXiv 2405.14256).

Its bits by saliency are a policy's choice: with `memory.evicted = "demote"` what a policy lets go comes down to
these bits, and what it keeps stays in full numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvcli.kv.formats.block_format import BlockFormat, Codes
from kvcli.kv.formats.quantization import LARGEST, dequantize, quantize

if TYPE_CHECKING:
    from kvcli.settings.schema import Kv

LEAST = 2.0**-14  # of a scale of a channel: the smallest that float16 holds in full precision


@dataclass(frozen=True)
class ZipCache(BlockFormat):
    """Divide each channel by the root of its largest number, and round each slot in one range of its own."""

    keys: Literal["channel", "separable"] = "channel"  # keys: by channel, as published, or as values are

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        keys = quantize(k, kv.k_bits, -2) if self.keys == "channel" else separated(k, kv.k_bits)
        return *keys, *separated(v, kv.v_bits)

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, values = codes[:-4], codes[-4:]
        k = dequantize(keys, kv.k_bits, exact) if self.keys == "channel" else joined(keys, kv.k_bits, exact)
        return k, joined(values, kv.v_bits, exact)


def separated(x: Tensor, bits: int) -> Codes:
    """x [.., g, D] -> codes, scale and zero of slots [.., g, 1], and c = sqrt(max |x|) of channels [.., 1, D]."""
    c = x.abs().amax(-2, keepdim=True).sqrt().clamp(LEAST, LARGEST).to(torch.float16)
    return *quantize(x / c.to(x.dtype), bits, -1), c


def joined(of: Codes, bits: int, exact: torch.dtype) -> Tensor:
    """The inverse, but for rounding."""
    return dequantize(of[:3], bits, exact) * of[3].to(exact)
