"""Page index of the minimum and maximum of each key channel: Quest (Tang et al., arXiv 2406.10774).

The index takes 1 / page of the bytes of keys and values. Its scores are loose upper bounds: they assume that all keys
of a page are at the best corner of their box. If only one key of a page matters, the bound is a poor guide; smaller
pages or method `sketch` find it (docs/design/sparse-attention.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from kvcli.kernels.page_bounds import page_bounds
from kvcli.kernels.page_scores import Box, page_scores, why_not
from kvcli.kv.slots import AttentionParams
from kvcli.kv.sparse.index import Numbers, PageIndex, scale_and_softcap


@dataclass(frozen=True)
class MinMax(PageIndex):
    """Page index of channel minima and maxima, in the dtype of the keys."""

    is_bound = True

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Compute low and high [K, P, D] of k [K, P, page, D]."""
        return k.amin(2), k.amax(2)

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score a page as if all its slots were at the bound."""
        low, high = pages
        if why_not(rows) or low.dtype != rows.dtype:
            return scale_and_softcap(page_bounds(rows, low, high), params) + math.log(self.page)
        return page_scores(rows, Box(low, high), 1, params.scale, params.softcap) + math.log(self.page)
