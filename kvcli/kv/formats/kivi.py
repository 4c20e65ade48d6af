"""Few bits as they are read where they lie: keys by channel, values by slot (KIVI, arXiv 2402.02750;
kv/tiers/quantized.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.kv.formats.block_format import Blocks

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvcli.kv.formats.block_format import Codes
    from kvcli.kv.formats.format import OfModel
    from kvcli.kv.slots import LayerShape
    from kvcli.kv.sparse.page_source import Shelf
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class Kivi(Blocks):
    """Round keys by channel in groups of slots, values by slot; `kv.k_bits` and `kv.v_bits` say to how many bits.

    Keys before the rotary embedding are in no form that kernels read as it lies: they are read back first.
    """

    def packs(self, kv: Kv) -> bool:
        return min(kv.k_bits, kv.v_bits) < 16

    def refuses(self, kv: Kv) -> Mapping[str, str]:
        return super().refuses(kv) if self.rope == "before" and self.packs(kv) else {}

    def tier(self, of: OfModel, device: torch.device, kv: Kv) -> Shelf:
        if self.rope == "before":
            return super().tier(of, device, kv)
        from kvcli.kv.tiers.quantized import Packed

        keys = {"k_bits": kv.k_bits, "v_bits": kv.v_bits, "group": kv.group}
        return Packed(of.shapes, of.dtype, device, **keys, rotate=kv.rotate, halves=kv.halves)

    def nbytes(self, shape: LayerShape, kv: Kv, number: int) -> int:
        """With 8 bits a scale of 16 bit each, with fewer, or in halves, two per group."""
        if self.rope == "before":
            return super().nbytes(shape, kv, number)
        from kvcli.kv.footprint import POSITION

        bits = 0.0  # of all numbers of a key and a value
        k_dim, v_dim = shape.parts
        for b, dim, group in ((kv.k_bits, k_dim, kv.group), (kv.v_bits, v_dim, min(kv.group, v_dim))):
            bits += (
                8 * dim * number if b == 16 else 8 * dim + 16 if b == 8 and not kv.halves else dim * (b + 32 / group)
            )
        return int(shape.n_kv_heads * bits / 8) + POSITION

    def pack(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        from kvcli.kv.formats.quantization import by_slot, rounded

        return *rounded(k, kv.k_bits, -2), *by_slot(v, kv.v_bits, kv.group)

    def unpack(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        from kvcli.kv.formats.quantization import numbers, of_slots

        return numbers(codes[:3], kv.k_bits, exact), of_slots(codes[3:], kv.v_bits, exact)
