"""Pages by the smallest and largest number of each channel of their keys: Quest (Tang et al., arXiv 2406.10774).

Takes 1 / page of what keys and values take. A bound, but a loose one: all keys of a page at the corner of their box.
Where one key of a page matters its bound may say little; smaller pages, or a sketch, find it
(docs/design/sparse-attention.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from kvcli.kernels.page_bounds import page_bounds
from kvcli.kernels.page_scores import Box, page_scores, why_not
from kvcli.kv.slots import AttentionParams
from kvcli.kv.sparse.index import ContiguousPageIndex, Numbers, scale_and_softcap


@dataclass(frozen=True)
class MinMax(ContiguousPageIndex):
    """Minima and maxima, in the type of the keys."""

    is_bound = True

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """k [K, P, page, D] -> low, high [K, P, D]."""
        return k.amin(2), k.amax(2)

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, sight: AttentionParams) -> Tensor:
        """All slots of a page at its bound."""
        low, high = pages
        if why_not(rows) or low.dtype != rows.dtype:
            return scale_and_softcap(page_bounds(rows, low, high), sight) + math.log(self.page)
        return page_scores(rows, Box(low, high), 1, sight.scale, sight.softcap) + math.log(self.page)
