"""Keys rounded so that what is lost lies outside of a subspace that counts (SQuat, arXiv 2503.24358).

The paper spans it by queries. A tier never sees any, so here it is spanned by the keys of the block themselves: queries
that find something among them look along these directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from kvcli.kernels.quantize_kv import round_range, squeeze
from kvcli.kv.formats.block_format import BlockFormat, Codes
from kvcli.kv.formats.quantization import by_slot, dequantize, of_slots, singular_vectors
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class Squat(BlockFormat):
    """Round keys channel by channel, each making up for what those before it lost along the keys' main directions."""

    rank: Annotated[int, Range(1)] = 4  # directions: the keys' own, by singular value
    weight: Annotated[float, Range(above=0, most=1000)] = 10.0  # of an error along them, beside 1 in every direction

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        _, scale, zero = round_range(k, kv.k_bits, -2)
        step, low, levels = scale.to(k.dtype), zero.to(k.dtype), (1 << kv.k_bits) - 1
        # block by block, as `factors` does
        carry = torch.stack([self._carry(block) for block in k])  # [B, h, D, D], upper
        left, codes = k.clone(), torch.empty_like(k, dtype=torch.uint8)
        for c in range(k.shape[-1]):
            at = slice(c, c + 1)
            q = ((left[..., at] - low[..., at]) / step[..., at]).round_().clamp_(0, levels)
            lost = (left[..., at] - low[..., at] - q * step[..., at]) / carry[..., at, at]
            left[..., c + 1 :] -= lost * carry[..., at, c + 1 :]
            codes[..., at] = q.to(torch.uint8)
        return squeeze(codes, kv.k_bits), scale, zero, *by_slot(v, kv.v_bits, kv.group)

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        return dequantize(codes[:3], kv.k_bits, exact), of_slots(codes[3:], kv.v_bits, exact)

    def _carry(self, k: Tensor) -> Tensor:
        """How an error in one channel is made up for by later ones, so that e (1 + weight U U') e' is least.

        By the triangle of the inverse, as OPTQ does it (arXiv 2210.17323); U: the main directions of k [h, g, D].
        """
        inverse = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand(k.shape[0], -1, -1).clone()
        for u in singular_vectors(k, self.rank).unbind(-2):
            inverse -= self.weight / (1 + self.weight) * (u.unsqueeze(-1) * u.unsqueeze(-2))
        upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
        return upper
