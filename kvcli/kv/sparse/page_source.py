"""Page source: read access of sparse attention to single slots of a tier."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvcli.kernels.attend_invariant import StoredKV
from kvcli.kv.cache.level import CroppableTier
from kvcli.kv.slots import Slots, Tier, picked


class PageSource(Protocol):
    """Read access to slots of a tier by index, in the order of `slots`, without reading all of them."""

    @property
    def is_far(self) -> bool:
        """True if a page cache saves time, because slots are read across a link."""

    def positions(self, layer: int) -> Tensor:
        """Return pos [K, S] of all slots, -1 = empty."""

    def run(self, layer: int) -> StoredKV | None:
        """Return the slots in place if rows can read them there, else None."""

    def n_stable(self, layer: int, n: Tensor) -> Tensor:
        """Return [K]: how many of the first n [K] slots of each head no later change of other slots can alter."""

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Return a copy of slots index [K, M] of each head, -1 = empty; empty slots are finite too."""

    def head(self, layer: int, head: int, n: int) -> Slots:
        """Return the first n slots of one head: k, v [1, n, D], pos [1, n]."""


class PageTier(CroppableTier, PageSource, Protocol):
    """A tier that reads single slots at low cost."""


class AnyTierSource:
    """Reference page source of any tier, through its `slots`."""

    is_far = False

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def positions(self, layer: int) -> Tensor:
        """Return the positions of the tier."""
        return self._tier.slots(layer).pos

    def run(self, layer: int) -> StoredKV | None:
        """Return None: the layout of the tier is unknown."""
        return None

    def n_stable(self, layer: int, n: Tensor) -> Tensor:
        """Return n: for tiers that never quantize, or quantize once."""
        return n

    def gather(self, layer: int, index: Tensor) -> Slots:
        """Return a copy of slots index [K, M]."""
        s = self._tier.slots(layer)
        return picked(s, index.to(s.pos.device))

    def head(self, layer: int, head: int, n: int) -> Slots:
        """Return the first n slots of one head as views."""
        s = self._tier.slots(layer)
        return Slots(*(t[head : head + 1, :n] for t in (s.k, s.v, s.pos)))
