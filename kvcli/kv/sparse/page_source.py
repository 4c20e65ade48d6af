"""Page source: read access of sparse attention to single slots of a tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from kvcli.kernels.attend_invariant import StoredKV
from kvcli.kv.slots import LowerTier, Slots

# Returns slots on their way, for device operations that are queued after its call.
Arrival = Callable[[], Slots]


class PageSource(Protocol):
    """Read access to slots of a tier by index, in the order of `slots`, without reading all of them."""

    @property
    def gather_async(self) -> Callable[[int, Tensor], Arrival] | None:
        """Function that starts `gather` of a layer beside the computation, for slots across a link, where a page cache
        saves time. None = there is no link."""

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


class PageTier(LowerTier, PageSource, Protocol):
    """A tier that reads single slots at low cost."""
