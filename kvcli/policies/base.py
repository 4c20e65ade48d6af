"""What a policy is: the answer to one question, which slots to keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.kv.slots import Slots


class Policy(Protocol):
    """Picks slots to keep. What happens to the rest (drop, demote, hide) is not its business."""

    @property
    def recent(self) -> int:
        """How many of the latest accepted queries it wants to see; 0 = none."""

    def keep(self, layer: int, q: Tensor, s: Slots, kinds: Tensor) -> Tensor:
        """q [H, w, D] the latest queries, kinds [T] token classes by position -> bool [K, S], ragged heads allowed."""
