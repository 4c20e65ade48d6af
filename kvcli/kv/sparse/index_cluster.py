"""Page index of mean keys of clusters, whose keys have similar directions: ClusterKV (Liu et al., arXiv 2412.03213).

A page is a window of tokens whose keys are clustered separately (k-means with cosine similarity, starting from evenly
spaced keys), so clusters never change later. The paper clusters the whole prompt at once. All slots of a cluster have
the score of its mean, so rows read whole clusters, best first; the last one is read as far as the page budget allows.
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

ROUNDS = 8  # iterations of k-means; few keys change their cluster after that
AT_ONCE = 1 << 20  # key-cluster pairs of each head that are computed at a time


@dataclass(frozen=True)
class Clusters:
    """Page index of cluster means, in the dtype of the keys, and the cluster of each slot."""

    page: int  # slots in a window
    n: int  # clusters in a window
    selection_unit = 1
    is_bound = False

    def learn(self, k: Tensor) -> Numbers:
        """No shared values."""
        return ()

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Cluster k [K, P, page, D] -> means [K, P, n, D], and the cluster of each slot, int16 [K, P, page]."""
        # one window at a time: matrix products would round differently for each number of windows
        found = [clusters(k[:, i], self.n) for i in range(k.shape[1])]
        means, of = (torch.stack(each, 1) for each in zip(*found, strict=True))
        return means.to(k.dtype), of.to(torch.int16)

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score each slot by the product of the query and the mean of the slot's cluster."""
        means, of = pages
        return by_member(mean_scores(rows, means.flatten(1, 2), params), of, self.n)


def clusters(k: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Cluster keys k [K, W, D] -> means [K, n, D] in float32 or wider, and the cluster of each key [K, W].

    A cluster without keys keeps its last mean.
    """
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    means, way = k[:, torch.arange(n, device=k.device) * k.shape[1] // n], normalize(k, dim=-1).transpose(1, 2)
    blocks = [slice(a, a + max(1, AT_ONCE // n)) for a in range(0, k.shape[1], max(1, AT_ONCE // n))]
    for _ in range(ROUNDS):
        unit = normalize(means, dim=-1)
        of = torch.cat([(unit @ way[..., block]).argmax(1) for block in blocks], 1)  # [K, W]
        # products with ones and zeros, because a GPU adds sums by index in a different order each time
        total, count = (sum(each) for each in zip(*(_sums(k[:, at], of[:, at], n) for at in blocks), strict=True))
        means = torch.where(count > 0, total / count.clamp(min=1), means)
    return means, of


def _sums(k: Tensor, of: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Sum keys k [K, W, D] by their clusters `of` [K, W] -> sums [K, n, D] and key counts [K, n, 1]."""
    each = (of.unsqueeze(1) == torch.arange(n, device=k.device).unsqueeze(1)).to(k.dtype)  # [K, n, W]
    return each @ k, each.sum(2, keepdim=True)


def mean_scores(rows: Tensor, means: Tensor, params: AttentionParams) -> Tensor:
    """Score means [K, U, D] for rows [K, R, D] -> [K, R, U], batch invariant: each mean is a box of one point."""
    if why_not(rows) or means.dtype not in (torch.bfloat16, torch.float32):
        return scale_and_softcap(page_bounds(rows, means, means), params)
    return page_scores(rows, Box(means, means), 1, params.scale, params.softcap)


def by_member(score: Tensor, of: Tensor, n: int) -> Tensor:
    """Expand cluster scores [K, R, P * n] to slots [K, R, S]; `of` [K, P, page] is the cluster in the page, 0..n-1."""
    first = torch.arange(0, n * of.shape[1], n, device=of.device).view(1, -1, 1)
    at = (of.long() + first).flatten(1).unsqueeze(1)  # [K, 1, S]
    return score.gather(2, at.expand(-1, score.shape[1], -1))
