"""Page index of low-rank keys: the page selection of ShadowKV (Sun et al., arXiv 2410.21465).

The directions of each KV head are the top singular vectors of the layer's first keys. The index stores the coordinates
of every key along them, so a score is a product of a few numbers. The paper factors keys before the rotary embedding,
where fewer directions suffice, and rebuilds keys from the factors. Here keys are indexed as stored, after the rotary
embedding, and selected slots are read from the tier without loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kv.formats.format import eigenvectors
from kvcli.kv.slots import AttentionParams
from kvcli.kv.sparse.index import ContiguousPageIndex, Numbers, by_page
from kvcli.kv.sparse.index_cluster import mean_scores


@dataclass(frozen=True)
class LowRank(ContiguousPageIndex):
    """Page index of key coordinates, in the dtype of the keys."""

    rank: int
    is_bound = False

    def learn(self, k: Tensor) -> Numbers:
        """Compute the top directions of k [K, S, D] -> [K, rank, D], at most D of them."""
        k = k.to(torch.promote_types(k.dtype, torch.float32))
        directions = eigenvectors(k.transpose(1, 2) @ k)  # [K, D, D], largest eigenvalue last
        return (directions[..., -self.rank :].transpose(1, 2).contiguous(),)

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Compute the coordinates of k [K, P, page, D] -> [K, P, page, rank]."""
        (directions,) = shared
        # with the score kernel: a matrix product would round differently for each number of pages
        at = mean_scores(directions, k.flatten(1, 2), AttentionParams(1.0)).transpose(1, 2)
        return (at.reshape(*k.shape[:3], -1).to(k.dtype),)

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score pages by the product of the query and each key, both projected on the directions."""
        (at,), (directions,) = pages, shared
        rows = mean_scores(rows, directions, AttentionParams(1.0))  # [K, R, rank]
        return by_page(mean_scores(rows, at.flatten(1, 2), params), self.page)
