"""SQuat: keys are quantized so that the error is orthogonal to an important subspace.

The paper spans the subspace by queries. A tier has none, so here it is spanned by the keys of the block. Queries would
lose less, and policy `budget` still less in fewer bytes (docs/measurements/kv-cache.md, "Bits by importance").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from kvcli.kernels.quantize_kv import round_range, squeeze
from kvcli.kv.formats.block_format import BlockFormat
from kvcli.kv.formats.format import Codes, by_slot, dequantize, of_slots, singular_vectors
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class Squat(BlockFormat):
    """SQuat (2025, arXiv 2503.24358): keys by channel, each correcting the error along the keys' main directions.

    In 2 + 2 bits, the KV takes 1.31 MiB and the demo model's accuracy is 0.917 (measurements/kv-cache.md).
    """

    rank: Annotated[int, Range(1)] = 4  # key directions to protect, by singular value
    weight: Annotated[float, Range(above=0, most=1000)] = 10.0  # weight of errors along them; other directions have 1

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        _, scale, zero = round_range(k, kv.k_bits, -2)
        step, low, levels = scale.to(k.dtype), zero.to(k.dtype), (1 << kv.k_bits) - 1
        # block by block, as in `low_rank_factors`
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
        """Return the factors by which later channels correct an error so that e (1 + weight U U') e' is least.

        They are the Cholesky factor of the inverse, as in OPTQ (arXiv 2210.17323); U: main directions of k [h, g, D].
        """
        inverse = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device).expand(k.shape[0], -1, -1).clone()
        for u in singular_vectors(k, self.rank).unbind(-2):
            inverse -= self.weight / (1 + self.weight) * (u.unsqueeze(-1) * u.unsqueeze(-2))
        upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
        return upper
