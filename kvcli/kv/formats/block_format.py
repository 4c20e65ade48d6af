"""KV formats: how old slots are stored, chosen by `kv_format.method`. Each is a pair of functions over blocks of slots;
tier and byte counts are shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvcli.errors import BadConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvcli.kv.formats.format import Codes, FormatContext
    from kvcli.kv.slots import LayerShape
    from kvcli.kv.sparse.page_source import PageTier
    from kvcli.kv.tiers.block_tier import BlockCodec
    from kvcli.settings.schema import Kv

APART = {"kv.rotate": "which spreads the outliers that are stored apart over all channels"}


@dataclass(frozen=True)
class BlockFormat:
    """Base of KV formats: frozen dataclasses whose fields are the keys of `[kv_format]`. A block is `kv.group` slots of
    one head, or of several heads quantized together.

    `quantize` and `dequantize` are pure, process each block separately, and do not synchronize with the device.
    Dequantized slots have the same bits whichever blocks are dequantized together. Therefore no matrix products are
    used, because their sums depend on the batch.
    """

    rope: Literal["after", "before"] = "after"  # quantize keys after, or before, the rotary embedding

    own: ClassVar[Mapping[str, str]] = {}  # keys of [kv] -> why this format does not support them
    splits_heads: ClassVar[bool] = False  # True if heads may be in several processes: blocks hold one head each
    rounds: ClassVar[bool] = True  # quantizes to kv.k_bits and kv.v_bits; otherwise it stores fewer elements of 16 bits

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        """Quantize k [B, h, g, D] and v [B, h, g, E], in float32 or wider."""
        raise NotImplementedError

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        """Dequantize to k [B, h, g, D] and v [B, h, g, E] of type `exact`, for `dims` (D, E)."""
        raise NotImplementedError

    def is_active(self, kv: Kv) -> bool:
        """True if these settings store slots in this format."""
        return True

    def unsupported_keys(self, kv: Kv) -> Mapping[str, str]:
        """Return keys of `[kv]` that the format does not support, with reasons. `tier` checks the model."""
        is_wide = {f"kv.{key}": getattr(kv, key) == 16 for key in ("k_bits", "v_bits")}
        why = "which does not quantize: 8, 4 and 2 do" if self.rounds else "but this KV format does not quantize"
        bits = {key: why for key, is_16 in is_wide.items() if is_16 == self.rounds}
        turned = {"kv.rotate": self.own.get("kv.rotate", 'which rotates what only kv_format.method = "kivi" quantizes')}
        halves = {"kv.split_codes": 'and split codes need kv_format.method = "kivi"'}
        return bits | (turned if kv.rotate != "none" else {}) | (halves if kv.split_codes else {})

    def heads(self, n: int) -> int:
        """Return how many of n KV heads are quantized together."""
        return 1

    def refuse(self, shape: LayerShape, kv: Kv) -> None:
        """Raise BadConfig if the format does not support slots of this shape."""
        for key, bits, dim in zip(("kv.k_bits", "kv.v_bits"), (kv.k_bits, kv.v_bits), shape.parts, strict=True):
            if self.rounds and dim * bits % 8:
                why = f"its heads have {dim} numbers, and a byte holds {8 // bits}"
                raise BadConfig(
                    f"{key} = {bits} does not fit this model: {why}", code="kv_bits", try_=[f"--set {key}=8"]
                )

    def codec(self, kv: Kv, shape: LayerShape, **more: Any) -> BlockCodec:
        """Return the quantizer of a layer. `more`: as in `BlockCodec`."""
        from kvcli.kv.tiers.block_tier import BlockCodec

        return BlockCodec(self.quantize, self.dequantize, kv, shape.parts, self.heads(shape.n_kv_heads), **more)

    def tier(self, of: FormatContext, device: torch.device, kv: Kv) -> PageTier:
        """Return an empty tier. Raises BadConfig or BadModel if the model is not supported."""
        from kvcli.kv.tiers.block_tier import BlockTier

        rotaries, forms = of.turns() if self.rope == "before" else [None] * len(of.shapes), {}
        for layer, (shape, rotary) in enumerate(zip(of.shapes, rotaries, strict=True)):
            if shape.shared_from is None:
                self.refuse(shape, kv)
                # the tier may be on another device than the model
                here = rotary and replace(rotary, inv_freq=rotary.inv_freq.to(device))
                forms[layer] = self.codec(kv, shape, rotary=here, dtype=of.dtype).form
        return BlockTier(forms, of.shapes, of.dtype, device)

    def nbytes(self, shape: LayerShape, kv: Kv, number: int) -> int:
        """Return bytes of a slot of all heads with its position; `number`: bytes of an element in full precision."""
        from kvcli.kv.slots import POSITION

        codec = self.codec(kv, shape)
        taken = sum(t.nbytes for t in codec.layout(1))
        return -(-shape.n_kv_heads * taken // (codec.heads * kv.group)) + POSITION
