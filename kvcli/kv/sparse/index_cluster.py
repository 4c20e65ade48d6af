"""Clusters of keys that point alike, by their means: ClusterKV (Liu et al., arXiv 2412.03213).

A page is a window of the text whose keys are clustered by themselves (k-means with cosine similarity, from keys that
stand evenly apart), so what is clustered once stays. All slots of a cluster have the score of its mean, so rows read
whole clusters, the best ones first, and of the last one what the budget has left. The paper clusters a prompt at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvcli.kernels.page_bounds import page_bounds
from kvcli.kernels.page_scores import Box, page_scores, why_not
from kvcli.kv.slots import AttentionParams
from kvcli.kv.sparse.index import Numbers, scale_and_softcap

ROUNDS = 8  # of k-means; few keys change sides after that
AT_ONCE = 1 << 20  # pairs of a key and a cluster, of each head, that exist at a time


@dataclass(frozen=True)
class Clusters:
    """Means in the type of the keys, and which one each slot belongs to."""

    page: int  # slots of a window
    n: int  # clusters in it
    selection_unit = 1
    is_bound = False

    def learn(self, k: Tensor) -> Numbers:
        """Nothing."""
        return ()

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """k [K, P, page, D] -> means [K, P, n, D], and the cluster of each slot, int16 [K, P, page]."""
        # window by window: products of a shape of their own for each number of windows would round otherwise
        found = [clusters(k[:, i], self.n) for i in range(k.shape[1])]
        means, of = (torch.stack(each, 1) for each in zip(*found, strict=True))
        return means.to(k.dtype), of.to(torch.int16)

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, sight: AttentionParams) -> Tensor:
        """The product with the mean of its cluster, for each slot."""
        means, of = pages
        return by_member(mean_scores(rows, means.flatten(1, 2), sight), of, self.n)


def clusters(k: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Keys k [K, W, D] -> means [K, n, D] in float32 or wider, and the cluster of each key [K, W].

    A cluster that has lost all its keys keeps its mean.
    """
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    means, way = k[:, torch.arange(n, device=k.device) * k.shape[1] // n], normalize(k, dim=-1).transpose(1, 2)
    blocks = [slice(a, a + max(1, AT_ONCE // n)) for a in range(0, k.shape[1], max(1, AT_ONCE // n))]
    for _ in range(ROUNDS):
        unit = normalize(means, dim=-1)
        of = torch.cat([(unit @ way[..., block]).argmax(1) for block in blocks], 1)  # [K, W]
        # products with ones and zeros: sums by index come in an order of their own each time on a GPU
        total, count = (sum(each) for each in zip(*(_sums(k[:, at], of[:, at], n) for at in blocks), strict=True))
        means = torch.where(count > 0, total / count.clamp(min=1), means)
    return means, of


def _sums(k: Tensor, of: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Keys k [K, W, D] of clusters `of` [K, W] -> their sums [K, n, D] and numbers [K, n, 1]."""
    each = (of.unsqueeze(1) == torch.arange(n, device=k.device).unsqueeze(1)).to(k.dtype)  # [K, n, W]
    return each @ k, each.sum(2, keepdim=True)


def mean_scores(rows: Tensor, means: Tensor, sight: AttentionParams) -> Tensor:
    """rows [K, R, D], means [K, U, D] -> [K, R, U]: each row's by itself, as the bounds of a box that is one point."""
    if why_not(rows) or means.dtype not in (torch.bfloat16, torch.float32):
        return scale_and_softcap(page_bounds(rows, means, means), sight)
    return page_scores(rows, Box(means, means), 1, sight.scale, sight.softcap)


def by_member(score: Tensor, of: Tensor, n: int) -> Tensor:
    """Scores [K, R, P * n] of what slots belong to, `of` [K, P, page] one of n in their page -> of slots [K, R, S]."""
    first = torch.arange(0, n * of.shape[1], n, device=of.device).view(1, -1, 1)
    at = (of.long() + first).flatten(1).unsqueeze(1)  # [K, 1, S]
    return score.gather(2, at.expand(-1, score.shape[1], -1))
