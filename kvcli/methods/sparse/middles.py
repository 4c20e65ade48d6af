"""Page index of extreme keys for a segment's middle: CritiPrefill (Lv et al., arXiv 2409.12490).

The published code ranks blocks by the mean over query heads, and mixes in a quarter of the scores of the layer below.
Here units rank by their largest share in any head, as in all methods, and layers do not know each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.page_bounds import page_bounds
from kvcli.kv.slots import AttentionParams
from kvcli.kv.sparse.index import Numbers, scale_and_softcap
from kvcli.kv.sparse.index_minmax import MinMax


@dataclass(frozen=True)
class Middles(MinMax):
    """CritiPrefill (Lv et al., arXiv 2409.12490): a page's better corner, for the middle of a segment's rows."""

    is_bound = False

    def sample(self, rows: Tensor) -> Tensor:
        """Compute the middle between the maximum and the minimum of rows [K, G, N, D] -> [K, G, 1, D]."""
        return (rows.amax(2, keepdim=True) + rows.amin(2, keepdim=True)) / 2

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score a page by its minimum or its maximum, whichever is better."""
        low, high = (page_bounds(rows, each, each) for each in pages)
        return scale_and_softcap(torch.maximum(low, high), params)
