"""LongValues (no paper) keeps the slots whose values are long.

It costs one pass over the values of a layer, and no record of queries; what it brings was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.policies.scoring.topk import TopK
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class LongValues(TopK):
    """Keep the tokens whose values have the largest norm."""

    power: Annotated[int, Range(1, 4)] = 2  # of the norm; 2 = Euclidean

    name: ClassVar[str] = "example-score"
    by: ClassVar[str] = "how long its values are"
    is_share: ClassVar[bool] = False  # these scores are no shares of a total

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the norm of each value, [K, S]."""
        return s.v.float().abs().pow(self.power).sum(-1).pow(1 / self.power)
