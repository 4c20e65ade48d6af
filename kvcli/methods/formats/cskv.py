"""CSKV: low-rank factors in place of keys and values (arXiv 2409.10593; keys as in ShadowKV, arXiv 2410.21465).

The paper fits one pair of matrices to each layer's weights and trains it. Here each block has its own directions, those
of least loss, so nothing is trained, and a block must be long (`kv.group`) to save bytes. The
newest tokens are kept in full precision (`kv.residual`), as in the paper. With 16-bit values and sparse attention, rows
read as in ShadowKV: the keys of selected pages are rebuilt, and their values fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from kvcli.errors import BadConfig
from kvcli.kv.formats.block_format import BlockFormat
from kvcli.kv.formats.format import Codes, grouped, low_rank_factors, product, to_16_bit
from kvcli.settings.profile import ALIKE_HEADS, Needs
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.kv.slots import LayerShape
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class Cskv(BlockFormat):
    """CSKV (2024, arXiv 2409.10593): low-rank factors of each block of keys and of values, over several heads.

    At rank 32, the KV takes 2.62 MiB and the demo model's accuracy is 0.833 (measurements/kv-cache.md).
    """

    rope: Literal["after", "before"] = "before"  # store keys before RoPE, where their rank is lower, or after
    k_rank: Annotated[int, Range(1)] = 16  # rank of the keys of a block
    v_rank: Annotated[int, Range(0)] = 16  # rank of the values of a block; 0 = values in 16 bits
    joint: Annotated[int, Range(1)] = 8  # heads that share factors, at most; must divide a layer's heads

    rounds = False

    @property
    def needs(self) -> Needs | None:
        """Heads that are rounded together must hold the same tokens."""
        return ALIKE_HEADS if self.joint > 1 else None

    def heads(self, n: int) -> int:
        return max(h for h in range(1, min(n, self.joint) + 1) if n % h == 0)

    def refuse(self, shape: LayerShape, kv: Kv) -> None:
        h, g = self.heads(shape.n_kv_heads), kv.group
        for key, rank, dim in zip(("k_rank", "v_rank"), (self.k_rank, self.v_rank), shape.parts, strict=True):
            most = -(-g * h * dim // (g + h * dim)) - 1  # largest rank that takes less than the slots themselves
            if rank > most:
                raise BadConfig(
                    f"kv_format.{key} = {rank} saves nothing: {g} tokens, {h} heads of {dim} numbers",
                    code="form_rank",
                    try_=[f"--set kv_format.{key}={most // 2 or 1}", f"--set kv.group={4 * g}"],
                )

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        values = low_rank_factors(_wide(v), self.v_rank) if self.v_rank else (to_16_bit(v),)
        return *low_rank_factors(_wide(k), self.k_rank), *values

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        k_share, k_way, *of_values = codes  # [B, r, g] and [B, r, h D]
        k = _narrow(product(k_share, k_way, exact), dims[0])
        if not self.v_rank:
            return k, of_values[0].to(exact)
        v_share, v_way = of_values
        return k, _narrow(product(v_share, v_way, exact), dims[1])


def _wide(x: Tensor) -> Tensor:
    """Concatenate heads: x [B, h, g, D] -> [B, g, h D]."""
    return x.transpose(1, 2).flatten(2)


def _narrow(x: Tensor, dim: int) -> Tensor:
    """Invert `_wide`."""
    return grouped(x, x.shape[2] // dim).transpose(1, 2)
