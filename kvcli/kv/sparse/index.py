"""An index: what is remembered of a page of keys, so that a row can tell which pages it wants without reading them.

A page is a run of slots of one KV head, and is summarised as a whole. Rows read it in grains: all of it, or, where what
is alike lies scattered in it (a cluster of its keys), slot by slot, those that are alike under one score. A score is
the logarithm of the softmax mass that a grain may hold for a query: an upper bound where the index `is_bound`, else an
estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcli.kv.slots import AttentionParams

Numbers = tuple[Tensor, ...]


class PageIndex(Protocol):
    """How pages are summarised and scored. Pure functions: Recall holds what they make."""

    @property
    def page(self) -> int:
        """Slots of a page."""

    @property
    def selection_unit(self) -> int:
        """Slots of it that have a score of their own, and are read together: a divisor of `page`."""

    @property
    def is_bound(self) -> bool:
        """Does no grain hold more mass than its score says?"""

    def learn(self, k: Tensor) -> Numbers:
        """What all pages of a layer share, from the first keys [K, S, D] that it sees; mostly nothing."""

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Keys of whole pages k [K, P, page, D] -> what is kept of them, [K, P, ..] each."""

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, sight: AttentionParams) -> Tensor:
        """rows [K, R, D] -> [K, R, P * page / grain], the log of the mass that each grain may hold."""


@dataclass(frozen=True)
class ContiguousPageIndex:
    """An index whose pages are read as a whole, and share nothing."""

    page: int

    @property
    def selection_unit(self) -> int:
        """All of a page."""
        return self.page

    def learn(self, k: Tensor) -> Numbers:
        """Nothing."""
        return ()


def scale_and_softcap(score: Tensor, sight: AttentionParams) -> Tensor:
    """Products of queries and keys as the layer's softmax sees them; the order stays."""
    score = score * sight.scale
    return sight.softcap * torch.tanh(score / sight.softcap) if sight.softcap > 0 else score


def by_page(score: Tensor, page: int) -> Tensor:
    """Log of the mass of each page from the scores of its slots: [K, R, P * page] -> [K, R, P]."""
    return score if page == 1 else score.view(*score.shape[:-1], -1, page).logsumexp(-1)
