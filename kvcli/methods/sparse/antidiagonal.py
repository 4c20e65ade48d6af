"""Page index of antidiagonal sums: XAttention (Xu et al., arXiv 2503.16428).

Rows and keys are cut into groups of `stride`. The first key of a group meets the last row of another, the second key
the row before it, and so on: the mean of these scores stands for all of both groups, so each key and each row counts
once for each group of the other side. That is 1 / stride of the products of attention. The paper's masks are for blocks
of 128 rows; here they are for a segment of a prompt, of any length. Scores are matrix products, which round differently
for other numbers of pages, but a segment always selects from the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcli.kv.slots import AttentionParams
from kvcli.kv.sparse.index import Numbers, PageIndex, by_page, scale_and_softcap


@dataclass(frozen=True)
class Antidiagonal(PageIndex):
    """Page index of the keys themselves, in groups of `stride`, which divides the page. It scores segments of rows."""

    stride: int

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Join the keys k [K, P, page, D] of each group -> [K, P, page / stride, stride * D]."""
        return (k.reshape(*k.shape[:2], -1, self.stride * k.shape[3]),)

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score pages by the mean scores of antidiagonals, for the groups of segments [K, G, N, D] -> [K, G, R, P]."""
        (keys,), (n_kv, n_queries, n, size) = pages, rows.shape
        whole = pad(rows, (0, 0, 0, -n % self.stride)).view(n_kv, n_queries, -1, self.stride, size)
        groups, wide = whole.flip(3).flatten(3), torch.promote_types(rows.dtype, torch.float32)
        score = groups.flatten(1, 2).to(wide) @ keys.flatten(1, 2).to(wide).transpose(1, 2)
        mean = scale_and_softcap(score, replace(params, scale=params.scale / self.stride))
        return by_page(mean, self.page // self.stride).view(*groups.shape[:3], -1)
