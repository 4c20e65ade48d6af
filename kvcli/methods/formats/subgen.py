"""A sketch of keys and values: keys by clusters, values by samples (SubGen, arXiv 2402.06082).

The paper opens a cluster for a key that is far from all others, however many these become, and draws values anew with
each token. Here the key that is farthest opens the next one until there are `centers` (greedy k-centers), in each block
by itself, so that a block takes the same bytes whatever is in it and is written once. A slot reads its center's key, so
a center counts in softmax's sum as often as its cluster has slots that were not let go since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from kvcli.kv.formats.block_format import BlockFormat, Codes
from kvcli.kv.formats.quantization import TINIEST, placed, product, to_16_bit
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class SubGen(BlockFormat):
    """Keep a few keys of a block, each for those near it, and a few values, each for its share of their lengths."""

    centers: Annotated[int, Range(1)] = 16  # keys of a block that are kept
    samples: Annotated[int, Range(1)] = 16  # values of a block that are kept: by squared length, a long one repeatedly

    rounds = False

    def quantize(self, k: Tensor, v: Tensor, kv: Kv) -> Codes:
        at, own = _centers(k, min(self.centers, kv.group))
        drawn, weight = _drawn(v, self.samples)
        keys, values = (t.gather(2, i[..., None].expand(-1, -1, -1, t.shape[3])) for t, i in ((k, at), (v, drawn)))
        return to_16_bit(keys), placed(own, kv.group), to_16_bit(values * weight[..., None]), placed(drawn, kv.group)

    def dequantize(self, codes: Codes, kv: Kv, dims: tuple[int, int], exact: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, own, values, drawn = codes
        k = keys.to(exact).gather(2, own.long()[..., None].expand(-1, -1, -1, dims[0]))
        slots = torch.arange(kv.group, device=drawn.device)
        return k, product(drawn[..., None].long() == slots, values, exact)


def _centers(k: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """k [B, h, g, D] -> n of its slots [B, h, n], each the farthest from those before it, the first one first.

    And of each slot the center that is nearest [B, h, g].
    """
    at = [k.new_zeros(k.shape[:2], dtype=torch.long)]
    far, own = k.new_full(k.shape[:3], torch.inf), k.new_zeros(k.shape[:3], dtype=torch.long)
    for i in range(n):
        center = k.gather(2, at[-1][..., None, None].expand(-1, -1, 1, k.shape[3]))
        away = (k - center).square().sum(3)
        own = torch.where(away < far, i, own)
        far = far.minimum(away)
        at.append(far.argmax(2))
    return torch.stack(at[:n], 2), own


def _drawn(v: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """v [B, h, g, E] -> n slots by their squared length, and what each counts [B, h, n], so that sums stay the same.

    At equal steps of the summed lengths, from half a step on: no lots, so that a block always says the same.
    """
    size = v.square().sum(3)  # [B, h, g]
    summed = size.cumsum(2)
    steps = (torch.arange(n, dtype=v.dtype, device=v.device) + 0.5) / n * summed[..., -1:]  # [B, h, n]
    drawn = (summed[..., None, :] <= steps[..., None]).sum(3).clamp(max=v.shape[2] - 1)
    return drawn, summed[..., -1:] / n / size.gather(2, drawn).clamp(min=TINIEST**2)
