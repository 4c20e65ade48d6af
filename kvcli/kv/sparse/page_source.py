"""Where Recall reads slots: some of them, by their place in a tier."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvcli.kernels.attend_invariant import StoredKV
from kvcli.kv.cache.level import CroppableTier
from kvcli.kv.slots import Slots, Tier, picked


class PageSource(Protocol):
    """Slots of a tier by their index, in the order in which `slots` shows them, without all of them being shown."""

    @property
    def is_far(self) -> bool:
        """Does it pay to keep what a pass read for the next one?"""

    def positions(self, layer: int) -> Tensor:
        """pos [K, S] of all slots, -1 = empty."""

    def run(self, layer: int) -> StoredKV | None:
        """The slots where they lie, should rows be able to read them there."""

    def n_stable(self, layer: int, n: Tensor) -> Tensor:
        """[K]: of the first n [K] slots of each head, how many keep their numbers whatever happens behind them."""

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Slots index [K, M] of each head, -1 = none: a copy, finite also where there is none."""

    def head(self, layer: int, head: int, n: int) -> Slots:
        """The first n slots of one head: k, v [1, n, D], pos [1, n]."""


class PageTier(CroppableTier, PageSource, Protocol):
    """A rung that serves a few of its slots cheaply."""


class AnyTierSource:
    """Any tier, by the slots that it shows: what its own way to a few of them must agree with."""

    is_far = False

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def positions(self, layer: int) -> Tensor:
        """As the tier has them."""
        return self._tier.slots(layer).pos

    def run(self, layer: int) -> StoredKV | None:
        """Nothing is known of where they lie."""
        return None

    def n_stable(self, layer: int, n: Tensor) -> Tensor:
        """All: for tiers that round nothing, or once."""
        return n

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Copied."""
        s = self._tier.slots(layer)
        return picked(s, index.to(s.pos.device))

    def head(self, layer: int, head: int, n: int) -> Slots:
        """The tier's own."""
        s = self._tier.slots(layer)
        return Slots(*(t[head : head + 1, :n] for t in (s.k, s.v, s.pos)))
