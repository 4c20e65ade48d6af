"""RotateKV: Hadamard rotation of keys before RoPE and over several heads, channels ordered by mean, sinks stored apart.

Each block has its own channel order; the paper measures one order beforehand. Attention sinks are detected by massive
activations, not by position: the paper finds them in hidden states, a tier by the norm of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from torch import Tensor

from kvcli.errors import BadConfig
from kvcli.kv.formats.block_format import BlockFormat
from kvcli.kv.formats.format import Codes, by_slot, grouped, of_slots, placed, to_16_bit
from kvcli.settings.profile import ALIKE_HEADS, Needs
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.kv.slots import LayerShape
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class RotateKV(BlockFormat):
    """RotateKV (2025, arXiv 2501.16383): one Hadamard rotation for keys of several heads, channels ordered by mean.

    In 2 + 2 bits, the KV takes 1.41 MiB and the demo model's accuracy is 0.99 (measurements/kv-cache.md).
    """

    rope: Literal["after", "before"] = "before"
    joint: Annotated[int, Range(1)] = 4  # heads rotated together, at most; a power of two that divides the heads
    massive: Annotated[int, Range(0)] = 1  # slots per block with the largest keys, kept in 16 bits

    own: ClassVar = {"kv.rotate": "which rotates keys, as this KV format does already"}

    @property
    def needs(self) -> Needs | None:
        """Heads that are rounded together must hold the same tokens."""
        return ALIKE_HEADS if self.joint > 1 else None

    def heads(self, n: int) -> int:
        return max(1 << i for i in range(self.joint.bit_length()) if 1 << i <= self.joint and n % (1 << i) == 0)

    def refuse(self, shape: LayerShape, kv: Kv) -> None:
        super().refuse(shape, kv)
        refuse_odd_sizes(shape, "rotatekv")

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        n = min(self.massive, kv.group)
        at = k.square().sum((1, 3)).topk(n, -1).indices  # [B, n]
        spared = (to_16_bit(t.gather(2, at[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3]))) for t in (k, v))
        wide = hadamard(_wide(k))  # [B, g, h D]
        order = wide.mean(1, keepdim=True).argsort(dim=-1, stable=True)  # [B, 1, h D]
        keys = by_slot(wide.gather(2, order.expand_as(wide)), kv.k_bits, kv.group)
        values = by_slot(hadamard(v), kv.v_bits, kv.group)
        return *keys, *values, placed(order, wide.shape[2]), placed(at, kv.group), *spared

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        order, at, *spared = codes[6:]
        ordered = of_slots(codes[:3], kv.k_bits, exact)
        wide = hadamard(torch.empty_like(ordered).scatter_(2, order.long().expand_as(ordered), ordered))
        k = grouped(wide, wide.shape[2] // dims[0]).transpose(1, 2)
        v = hadamard(of_slots(codes[3:6], kv.v_bits, exact))
        k, v = (
            t.scatter(2, at.long()[:, None, :, None].expand_as(found), found.to(exact))
            for t, found in zip((k, v), spared, strict=True)
        )
        return k, v


def refuse_odd_sizes(shape: LayerShape, method: str) -> None:
    """Raise BadConfig if a Hadamard transform does not fit the model's heads."""
    if odd := [dim for dim in shape.parts if dim & (dim - 1)]:
        raise BadConfig(
            f'kv_format.method = "{method}" needs head sizes of a power of two; this model has {odd[0]}',
            code="kv_rotate",
            try_=["--set kv_format.method=zipcache", "--set kv_format.method=kivi"],
        )


def _wide(k: Tensor) -> Tensor:
    """Concatenate heads: k [B, h, g, D] -> [B, g, h D]."""
    return k.transpose(1, 2).flatten(2)


def hadamard(x: Tensor) -> Tensor:
    """Multiply x [.., n] by the normalised Hadamard matrix, n a power of two; the transform is its own inverse."""
    n, step = x.shape[-1], 1
    x = x.movedim(-1, 0).contiguous()  # [n, ..]: so that every sum runs over contiguous memory
    while step < n:
        a, b = x.view(n // (2 * step), 2, step, -1).unbind(1)
        out = torch.empty_like(x)
        for i, made in enumerate(out.view(n // (2 * step), 2, step, -1).unbind(1)):
            torch.sub(a, b, out=made) if i else torch.add(a, b, out=made)
        x = out
        step *= 2
    return x.mul_(n**-0.5).movedim(0, -1).contiguous()
