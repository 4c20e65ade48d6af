"""GEAR: quantization to few bits, with the error corrected by outliers and a low-rank term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from kvcli.kv.formats.block_format import APART, BlockFormat
from kvcli.kv.formats.format import (
    Codes,
    by_slot,
    dequantize,
    low_rank_factors,
    merge_outliers,
    of_slots,
    product,
    quantize,
    split_outliers,
)
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class Gear(BlockFormat):
    """GEAR (2024, arXiv 2403.05527): keys per channel, values per token, outliers and a low-rank part of the error.

    In 2 + 2 bits, the KV takes 1.9 MiB and the demo model's accuracy is 0.969 (measurements/kv-cache.md).
    """

    outliers: Annotated[float, Range(0, 0.5)] = 0.02  # share of elements kept in 16 bits, per key channel and per value
    rank: Annotated[int, Range(0)] = 2  # rank of the stored quantization error, in 16 bits

    own = APART

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        k_inner, *k_apart = split_outliers(k.mT, round(self.outliers * k.shape[2] / 2))
        v_inner, *v_apart = split_outliers(v, round(self.outliers * v.shape[3] / 2))
        keys, values = quantize(k_inner.mT, kv.k_bits, -2), by_slot(v_inner, kv.v_bits, kv.group)
        k_lost = merge_outliers(
            (k_inner - dequantize(keys, kv.k_bits, k.dtype).mT), k_apart[0], torch.zeros_like(k_apart[1])
        )
        v_lost = merge_outliers(
            v_inner - of_slots(values, kv.v_bits, v.dtype), v_apart[0], torch.zeros_like(v_apart[1])
        )
        return (
            *keys,
            *values,
            *k_apart,
            *v_apart,
            *low_rank_factors(k_lost, self.rank),
            *low_rank_factors(v_lost, self.rank),
        )

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        k = dequantize(codes[:3], kv.k_bits, exact).mT
        v = of_slots(codes[3:6], kv.v_bits, exact)
        k, v = (
            merge_outliers(t + product(a, b, exact), at, found)
            for t, (at, found), (a, b) in ((k, codes[6:8], codes[10:12]), (v, codes[8:10], codes[12:]))
        )
        return k.mT, v
