"""ClusterKV: pages are windows, in which keys of similar directions are read together (Liu et al., arXiv 2412.03213).

A page is a window of tokens whose keys are clustered separately (k-means with cosine similarity, starting from evenly
spaced keys), so clusters never change later. The paper clusters the whole prompt at once. All slots of a cluster have
the score of its mean, so rows read whole clusters, best first; the last one is read as far as the page budget allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.kv.sparse.index import box_scores, widened
from kvcli.methods.sparse.page_selection import PER_PAGE, PageSelection
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.kv.slots import AttentionParams
    from kvcli.kv.sparse.index import Numbers

ROUNDS = 8  # iterations of k-means; few keys change their cluster after that
AT_ONCE = 1 << 20  # key-cluster pairs of each head that are computed at a time


@dataclass(frozen=True)
class Cluster(PageSelection):
    """ClusterKV (Liu et al., 2024, arXiv 2412.03213): whole clusters of keys with similar directions, best mean first.

    If `snap` demotes all but 12.5% of the tokens, the demo's accuracy is 0.672 (measurements/kv-cache.md).
    """

    window: Annotated[int, Range(2, most=32768)] = 512  # tokens clustered at a time; newer ones are read in full
    size: Annotated[int, Range(1)] = 16  # average tokens per cluster

    selection_unit = 1

    def __post_init__(self) -> None:
        if self.window % self.size:
            raise ValueError(f"window = {self.window} is no multiple of size = {self.size}")

    @property
    def page(self) -> int:
        return self.window

    @property
    def n(self) -> int:
        """Clusters in a window."""
        return self.window // self.size

    def _per_slot(self, head_dim: int, number: int) -> float:
        return head_dim * number / self.size + 2 + PER_PAGE

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Cluster k [K, P, page, D] -> means [K, P, n, D], and the cluster of each slot, int16 [K, P, page]."""
        import torch

        # one window at a time: matrix products would round differently for each number of windows
        found = [clusters(k[:, i], self.n) for i in range(k.shape[1])]
        means, of = (torch.stack(each, 1) for each in zip(*found, strict=True))
        return means.to(k.dtype), of.short()

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score each slot by the product of the query and the mean of the slot's cluster."""
        means, of = pages[0].flatten(1, 2), pages[1]
        return by_member(box_scores(rows, means, means, params), of, self.n)


def clusters(k: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Cluster keys k [K, W, D] -> means [K, n, D] in float32 or wider, and the cluster of each key [K, W].

    A cluster without keys keeps its last mean.
    """
    import torch
    from torch.nn.functional import normalize

    k = widened(k)
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
    import torch

    each = (of.unsqueeze(1) == torch.arange(n, device=k.device).unsqueeze(1)).to(k.dtype)  # [K, n, W]
    return each @ k, each.sum(2, keepdim=True)


def by_member(score: Tensor, of: Tensor, n: int) -> Tensor:
    """Expand cluster scores [K, R, P * n] to slots [K, R, S]; `of` [K, P, page] is the cluster in the page, 0..n-1."""
    import torch

    first = torch.arange(0, n * of.shape[1], n, device=of.device).view(1, -1, 1)
    at = (of.long() + first).flatten(1).unsqueeze(1)  # [K, 1, S]
    return score.gather(2, at.expand(-1, score.shape[1], -1))
