"""RoundedSlots (no paper) rounds the keys and the values of each slot to one scale.

It costs a pass over a block when slots are demoted and when they are read; what it brings was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.kv.formats.block_format import BlockFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvcli.kv.formats.format import Codes
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class RoundedSlots(BlockFormat):
    """Quantize each key and each value with one range, as `kv.k_bits` and `kv.v_bits` say."""

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        from kvcli.kv.formats.format import quantize

        return *quantize(k, kv.k_bits, -1), *quantize(v, kv.v_bits, -1)

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        from kvcli.kv.formats.format import dequantize

        return dequantize(codes[:3], kv.k_bits, exact), dequantize(codes[3:], kv.v_bits, exact)
