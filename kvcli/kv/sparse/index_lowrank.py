"""Pages by keys of low rank: ShadowKV (Sun et al., arXiv 2410.21465), as far as it says which keys are wanted.

The first keys of a layer teach the directions of each KV head that hold most of them (their singular vectors); of every
key the coordinates along these are kept, so a score is a product of a few numbers. The paper keeps keys as they are
before the rotary embedding, where fewer directions do, and rebuilds them from it; here the keys are as they are stored,
and those that are chosen are read where they lie, which no rounding touches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kv.formats.eigen import eigenvectors
from kvcli.kv.slots import AttentionParams
from kvcli.kv.sparse.index import ContiguousPageIndex, Numbers, by_page
from kvcli.kv.sparse.index_cluster import mean_scores


@dataclass(frozen=True)
class LowRank(ContiguousPageIndex):
    """Coordinates in the type of the keys."""

    rank: int
    is_bound = False

    def learn(self, k: Tensor) -> Numbers:
        """k [K, S, D] -> the directions that hold most of it, [K, rank, D], at most D of them."""
        k = k.to(torch.promote_types(k.dtype, torch.float32))
        directions = eigenvectors(k.transpose(1, 2) @ k)  # [K, D, D], those that hold most last
        return (directions[..., -self.rank :].transpose(1, 2).contiguous(),)

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """k [K, P, page, D] -> coordinates [K, P, page, rank]."""
        (directions,) = shared
        # as scores: a product of a shape of its own for each number of pages would round otherwise
        at = mean_scores(directions, k.flatten(1, 2), AttentionParams(1.0)).transpose(1, 2)
        return (at.reshape(*k.shape[:3], -1).to(k.dtype),)

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, sight: AttentionParams) -> Tensor:
        """From the product with each key as far as it lies along these directions."""
        (at,), (directions,) = pages, shared
        rows = mean_scores(rows, directions, AttentionParams(1.0))  # [K, R, rank]
        return by_page(mean_scores(rows, at.flatten(1, 2), sight), self.page)
