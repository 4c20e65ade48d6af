"""SubGen: a sketch of keys and values, keys by cluster centers, values by samples.

The paper opens a cluster for each key far from all others, without a limit on their number, and resamples values with
each token. Here the farthest key opens the next cluster until there are `centers` (greedy k-centers), in each block
separately, so that a block has a fixed size and is written once. A slot reads the key of its center, so a center counts
in the softmax sum once per slot of its cluster that is not evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from kvcli.kv.formats.block_format import BlockFormat
from kvcli.kv.formats.format import TINIEST, Codes, placed, product, to_16_bit
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.settings.schema import Kv


@dataclass(frozen=True)
class SubGen(BlockFormat):
    """SubGen (2024, arXiv 2402.06082): a few keys of a block as cluster centers, and a few values as weighted samples.

    With 32 centers, the KV takes 3.21 MiB and the demo model's accuracy is 0.0938 (measurements/kv-cache.md).
    """

    centers: Annotated[int, Range(1)] = 16  # keys kept per block, as cluster centers
    samples: Annotated[int, Range(1)] = 16  # values kept per block, sampled by squared norm, some several times

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
    """Select n slots [B, h, n] of k [B, h, g, D] as centers, starting with slot 0, each farthest from those before.

    Also returns the nearest center of each slot [B, h, g].
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
    """Sample n slots of v [B, h, g, E] by squared length; returns slots and weights [B, h, n] that preserve sums.

    Samples are at equal steps of the cumulative squared length, from half a step on, so that they are deterministic.
    """
    size = v.square().sum(3)  # [B, h, g]
    summed = size.cumsum(2)
    steps = (torch.arange(n, dtype=v.dtype, device=v.device) + 0.5) / n * summed[..., -1:]  # [B, h, n]
    drawn = (summed[..., None, :] <= steps[..., None]).sum(3).clamp(max=v.shape[2] - 1)
    return drawn, summed[..., -1:] / n / size.gather(2, drawn).clamp(min=TINIEST**2)
