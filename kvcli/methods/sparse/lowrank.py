"""The page selection of ShadowKV, by low-rank keys (Sun et al., arXiv 2410.21465).

The directions of each KV head are the top singular vectors of the layer's first keys. The index stores the coordinates
of every key along them, so a score is a product of a few numbers. The paper factors keys before the rotary embedding,
where fewer directions suffice, and rebuilds keys from the factors. Here keys are indexed as stored, after the rotary
embedding, and selected slots are read from the tier without loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.kv.sparse.index import box_scores, by_page, widened
from kvcli.methods.sparse.page_selection import PER_PAGE, PageSelection
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.kv.slots import AttentionParams
    from kvcli.kv.sparse.index import Numbers


@dataclass(frozen=True)
class LowRank(PageSelection):
    """ShadowKV's index (Sun et al., 2024, arXiv 2410.21465): pages with the highest scores, by low-rank keys.

    If `snap` demotes all but 12.5% of the tokens, the demo's accuracy is 0.995 (measurements/kv-cache.md).
    """

    page: Annotated[int, Range(1)] = 8  # tokens per page
    rank: Annotated[int, Range(1)] = 32  # elements kept per key, at most the head size

    def _per_slot(self, head_dim: int, number: int) -> float:
        return min(self.rank, head_dim) * number + PER_PAGE / self.page

    def _per_head(self, head_dim: int) -> float:
        return 4 * min(self.rank, head_dim) * head_dim  # directions

    def learn(self, k: Tensor) -> Numbers:
        """Compute the top directions of k [K, S, D] -> [K, rank, D], at most D of them."""
        from kvcli.kv.formats.format import eigenvectors

        k = widened(k)
        directions = eigenvectors(k.transpose(1, 2) @ k)  # [K, D, D], largest eigenvalue last
        return (directions[..., -self.rank :].transpose(1, 2).contiguous(),)

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Compute the coordinates of k [K, P, page, D] -> [K, P, page, rank], in the dtype of the keys."""
        (directions,), each = shared, k.flatten(1, 2)
        # with the score kernel: a matrix product would round differently for each number of pages
        at = box_scores(directions, each, each).transpose(1, 2)
        return (at.reshape(*k.shape[:3], -1).to(k.dtype),)

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score pages by the product of the query and each key, both projected on the directions."""
        (directions,), at = shared, pages[0].flatten(1, 2)
        rows = box_scores(rows, directions, directions)  # [K, R, rank]
        return by_page(box_scores(rows, at, at, params), self.page)
