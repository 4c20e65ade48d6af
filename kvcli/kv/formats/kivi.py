"""KIVI format: keys quantized by channel, values by slot; kernels read the codes directly (kv/tiers/quantized.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcli.kv.formats.block_format import BlockFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvcli.kv.formats.format import Codes, FormatContext
    from kvcli.kv.slots import LayerShape
    from kvcli.kv.sparse.page_source import PageTier
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class Kivi(BlockFormat):
    """KIVI (2024, arXiv 2402.02750): keys quantized per channel in groups of tokens, values per token.

    In 2 + 2 bits, the KV takes 1.27 MiB and the demo's accuracy is 0.958 (measurements/kv-cache.md).

    Keys quantized before the rotary embedding are dequantized first, because no kernel reads their codes.
    """

    splits_heads: ClassVar[bool] = True

    def is_active(self, kv: Kv) -> bool:
        return min(kv.k_bits, kv.v_bits) < 16

    def unsupported_keys(self, kv: Kv) -> Mapping[str, str]:
        return super().unsupported_keys(kv) if self.rope == "before" and self.is_active(kv) else {}

    def tier(self, of: FormatContext, device: torch.device, kv: Kv) -> PageTier:
        if self.rope == "before":
            return super().tier(of, device, kv)
        from kvcli.kv.tiers.quantized import QuantizedTier

        keys = {"k_bits": kv.k_bits, "v_bits": kv.v_bits, "group": kv.group}
        return QuantizedTier(of.shapes, of.dtype, device, **keys, rotate=kv.rotate, halves=kv.split_codes)

    def nbytes(self, shape: LayerShape, kv: Kv, number: int) -> int:
        """Return bytes per slot: at 8 bits a 16-bit scale per key and value; at fewer or in halves, two per group."""
        if self.rope == "before":
            return super().nbytes(shape, kv, number)
        from kvcli.kv.slots import POSITION

        bits = 0.0  # bits of all elements of a key and a value
        k_dim, v_dim = shape.parts
        for b, dim, group in ((kv.k_bits, k_dim, kv.group), (kv.v_bits, v_dim, min(kv.group, v_dim))):
            bits += (
                8 * dim * number
                if b == 16
                else 8 * dim + 16
                if b == 8 and not kv.split_codes
                else dim * (b + 32 / group)
            )
        return int(shape.n_kv_heads * bits / 8) + POSITION

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        from kvcli.kv.formats.format import by_slot, quantize

        return *quantize(k, kv.k_bits, -2), *by_slot(v, kv.v_bits, kv.group)

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        from kvcli.kv.formats.format import dequantize, of_slots

        return dequantize(codes[:3], kv.k_bits, exact), of_slots(codes[3:], kv.v_bits, exact)
