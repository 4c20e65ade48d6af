"""What a policy is: the answer to one question, which slots to keep."""

from __future__ import annotations

from dataclasses import dataclass
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


class Chosen(Protocol):
    """What the `[policy]` table of a profile becomes: each method's frozen dataclass."""

    @property
    def every(self) -> int | None:
        """Tokens between two boundaries while decoding; None = the past never changes."""

    def policy(self) -> Policy | None:
        """The policy of these settings; None = everything stays."""

    def slots(self, n: int) -> int:
        """How many of n slots a head keeps at a boundary: what memory is planned with."""


@dataclass(frozen=True)
class Everything:
    """Keep every token."""

    @property
    def every(self) -> int | None:
        return None

    def policy(self) -> Policy | None:
        return None

    def slots(self, n: int) -> int:
        return n
