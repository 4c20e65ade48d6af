"""Page index: summaries of pages of keys, from which rows select pages without reading the keys.

A page is a range of slots of one KV head and is summarized as a whole. Rows select parts of it, the selection units: a
unit is the whole page, or a single slot if similar keys are scattered over the page (a cluster gives one score to all
its slots). The score of a unit is the logarithm of the softmax mass that it may hold for a query: an upper bound if the
index `is_bound`, else an estimate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.kv.slots import AttentionParams

Numbers = tuple["Tensor", ...]


class PageIndex:
    """A method to summarize and score pages. All functions are pure: `Pages` stores their results."""

    is_bound: ClassVar[bool] = False  # scores are upper bounds: no unit holds more softmax mass than its score

    @property
    def page(self) -> int:
        """Number of slots in a page."""
        raise NotImplementedError

    @property
    def selection_unit(self) -> int:
        """Number of slots that share a score and are read together, a divisor of `page`; by default the whole page."""
        return self.page

    def learn(self, k: Tensor) -> Numbers:
        """Compute the values that all pages of a layer share from its first keys [K, S, D]; empty for most indexes."""
        return ()

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Summarize the keys of whole pages k [K, P, page, D] as tensors [K, P, ..]."""
        raise NotImplementedError

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score units for rows [K, R, D] -> [K, R, P * page / unit], the log of the mass that each unit may hold."""
        raise NotImplementedError


def scale_and_softcap(score: Tensor, params: AttentionParams) -> Tensor:
    """Apply the scale and softcap of the layer's softmax to query-key products; their order does not change."""
    score = score * params.scale
    return params.softcap * (score / params.softcap).tanh() if params.softcap > 0 else score


def box_scores(rows: Tensor, low: Tensor, high: Tensor, params: AttentionParams | None = None) -> Tensor:
    """Bound the scores of keys between low and high [K, U, D] for rows [K, R, D] -> [K, R, U]: those of a key if both
    are one. Without `params`: their products. Batch invariant where a native kernel computes it."""
    import torch

    from kvcli.kernels.page_bounds import page_bounds
    from kvcli.kernels.page_scores import Box, page_scores, why_not

    if why_not(rows) or low.dtype not in (torch.bfloat16, torch.float32):
        bound = page_bounds(rows, low, high)
        return scale_and_softcap(bound, params) if params else bound
    return page_scores(rows, Box(low, high), 1, *((params.scale, params.softcap) if params else (1.0, 0.0)))


def widened(k: Tensor) -> Tensor:
    """Return k in float32 or wider."""
    import torch

    return k.to(torch.promote_types(k.dtype, torch.float32))


def by_page(score: Tensor, page: int) -> Tensor:
    """Compute the log of each page's mass from the scores of its slots: [K, R, P * page] -> [K, R, P]."""
    return score if page == 1 else score.view(*score.shape[:-1], -1, page).logsumexp(-1)
