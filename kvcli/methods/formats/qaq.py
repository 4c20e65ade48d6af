"""QAQ: outliers stored in 16 bits, the rest quantized, keys per channel and values per token.

Keys tolerate less quantization than values: give them more bits (`kv.k_bits`). Giving more bits to tokens with much
attention is up to the eviction policy: `memory.evicted = "demote"` quantizes only the tokens that it drops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from kvcli.kv.formats.block_format import APART, BlockFormat
from kvcli.kv.formats.format import Codes, by_slot, dequantize, merge_outliers, of_slots, quantize, split_outliers
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class Qaq(BlockFormat):
    """QAQ (2024, arXiv 2403.04643): the largest and smallest elements of a block in 16 bits, the rest in fewer.

    In 2 + 2 bits, the KV takes 1.41 MiB and the demo model's accuracy is 0.969 (measurements/kv-cache.md).
    """

    outliers: Annotated[float, Range(0, 0.5)] = 0.01  # share of elements per block kept in 16 bits: largest, smallest

    own = APART

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        inner, *found = zip(*(split_outliers(t.flatten(2), self._each(t)) for t in (k, v)), strict=True)
        keys = quantize(inner[0].view_as(k), kv.k_bits, -2)
        return *keys, *by_slot(inner[1].view_as(v), kv.v_bits, kv.group), *(t for each in found for t in each)

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        inner = dequantize(codes[:3], kv.k_bits, exact), of_slots(codes[3:6], kv.v_bits, exact)
        k, v = (
            merge_outliers(t.flatten(2), at, found).view_as(t)
            for t, at, found in zip(inner, codes[6:8], codes[8:], strict=True)
        )
        return k, v

    def _each(self, t: Tensor) -> int:
        """Return the number of outliers at each end of the range of a block t [B, h, g, D]."""
        return round(self.outliers * t.shape[2] * t.shape[3] / 2)
