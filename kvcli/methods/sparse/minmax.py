"""Quest: pages are selected by the minimum and maximum of each key channel (Tang et al., arXiv 2406.10774).

The index takes 1 / page of the bytes of keys and values. Its scores are loose upper bounds: they assume that all keys
of a page are at the best corner of their box. If only one key of a page matters, the bound is a poor guide; smaller
pages or method `sketch` find it (docs/design/sparse-attention.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.kv.sparse.index import box_scores
from kvcli.methods.sparse.page_selection import PER_PAGE, PageSelection
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.kv.slots import AttentionParams
    from kvcli.kv.sparse.index import Numbers


@dataclass(frozen=True)
class MinMax(PageSelection):
    """Quest (Tang et al., 2024, arXiv 2406.10774): pages with the highest score bounds, by minimum and maximum of keys.

    The demo finds 0.0833 of the facts in a report, with 3,380 bytes of KV per token (measurements/kv-cache.md).
    """

    page: Annotated[int, Range(1)] = 16  # tokens per page

    is_bound = True

    def _per_slot(self, head_dim: int, number: int) -> float:
        return (2 * head_dim * number + PER_PAGE) / self.page

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Compute low and high [K, P, D] of k [K, P, page, D], in the dtype of the keys."""
        return k.amin(2), k.amax(2)

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score a page as if all its slots were at the bound."""
        low, high = pages
        return box_scores(rows, low, high, params) + math.log(self.page)
