"""Sparse attention by two-bit keys, which estimate the score of every token.

One landmark per page fails on tasks that read much of the prompt; two-bit keys solve most of these (YAKV). Channels are
centred and scaled by the mean and spread of the layer's first keys, because keys differ far more between channels than
between tokens (KIVI, arXiv 2402.02750). Each token has its own scale. The index takes 1 / 16 of the bytes of bf16 keys
and values, plus 2 bytes per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.kv.sparse.index import by_page, scale_and_softcap, widened
from kvcli.methods.sparse.page_selection import PER_PAGE, PageSelection
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.kv.slots import AttentionParams
    from kvcli.kv.sparse.index import Numbers

EDGE = 0.98  # threshold of the outer levels in standard deviations: least squared error for a normal distribution


@dataclass(frozen=True)
class Sketch(PageSelection):
    """Sketch (kvcli's own): pages with the highest scores, estimated from keys quantized to two bits.

    The demo finds all facts in a report; of 3,413 bytes per token, 166 are the index (measurements/kv-cache.md).
    """

    page: Annotated[int, Range(1)] = 4  # tokens per page

    def _per_slot(self, head_dim: int, number: int) -> float:
        return -(-head_dim // 4) + 2 + PER_PAGE / self.page

    def _per_head(self, head_dim: int) -> float:
        return 2 * 4 * head_dim  # means and spreads

    def learn(self, k: Tensor) -> Numbers:
        """Compute the mean and spread of each channel of k [K, S, D] -> [K, 1, D]."""
        k = widened(k)
        mean = k.mean(1, keepdim=True)
        spread = (k - mean).square().mean(1, keepdim=True).sqrt()
        return mean, spread.clamp_min(1e-6 * float(spread.max()) + 1e-30)

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Quantize k [K, P, page, D] -> packed levels [K, P, page, D / 4] and token scales [K, P, page]."""
        from kvcli.kernels.quantized_key_scores import pack2

        mean, spread = (t.unsqueeze(1) for t in shared)  # [K, 1, 1, D]
        x = (k.to(mean.dtype) - mean) / spread
        edge = EDGE * x.square().mean(-1, keepdim=True).sqrt()
        codes = (x > 0).byte() + (x > edge) + (x > -edge)  # 0..3
        level = codes.to(x.dtype) * 2 - 3
        scale = (x * level).sum(-1) / level.square().sum(-1)  # least squares
        return pack2(codes), scale.bfloat16()

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score pages by the estimated score of every token."""
        import torch

        from kvcli.kernels.page_scores import QuantizedPages, page_scores, why_not
        from kvcli.kernels.quantized_key_scores import code_scores, unpack2

        packed, scale = pages
        mean, spread = shared
        if not why_not(rows) and mean.dtype == torch.float32:
            coded = QuantizedPages(
                packed.flatten(1, 2), scale.flatten(1), mean=mean.squeeze(1), spread=spread.squeeze(1)
            )
            return page_scores(rows, coded, self.page, params.scale, params.softcap)
        rows = rows.to(mean.dtype)
        codes = unpack2(packed.flatten(1, 2), rows.shape[2])
        score = code_scores(rows * spread, codes, scale.flatten(1)) + rows @ mean.transpose(1, 2)
        return by_page(scale_and_softcap(score, params), self.page)
