"""Page index: summaries of pages of keys, from which rows select pages without reading the keys.

A page is a range of slots of one KV head and is summarized as a whole. Rows select parts of it, the selection units: a
unit is the whole page, or a single slot if similar keys are scattered over the page (a cluster gives one score to all
its slots). The score of a unit is the logarithm of the softmax mass that it may hold for a query: an upper bound if the
index `is_bound`, else an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvcli.kv.slots import AttentionParams

Numbers = tuple[Tensor, ...]


@dataclass(frozen=True)
class PageIndex:
    """A method to summarize and score pages. All functions are pure: `Pages` stores their results."""

    page: int  # slots in a page
    is_bound: ClassVar[bool] = False  # scores are upper bounds: no unit holds more softmax mass than its score

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
    return params.softcap * torch.tanh(score / params.softcap) if params.softcap > 0 else score


def by_page(score: Tensor, page: int) -> Tensor:
    """Compute the log of each page's mass from the scores of its slots: [K, R, P * page] -> [K, R, P]."""
    return score if page == 1 else score.view(*score.shape[:-1], -1, page).logsumexp(-1)
