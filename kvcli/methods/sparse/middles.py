"""Page index of extreme keys for a segment's middle: CritiPrefill (Lv et al., arXiv 2409.12490).

The published code ranks blocks by the mean over query heads, and mixes in a quarter of the scores of the layer below.
Here units rank by their largest share in any query head of the group, and layers do not know each other.
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
    """Page index of a page's minimum and maximum of each key channel. It scores segments of rows."""

    is_bound = False

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score pages by their minimum or their maximum, whichever is better for the middle of the extreme rows of
        segments [K, G, N, D] -> [K, G, 1, P]."""
        middle = (rows.amax(2) + rows.amin(2)) / 2
        low, high = (page_bounds(middle, each, each) for each in pages)
        return scale_and_softcap(torch.maximum(low, high), params).unsqueeze(2)
