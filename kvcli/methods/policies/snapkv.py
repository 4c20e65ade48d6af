"""SnapKV: score slots by attention of the newest queries, pooled over neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from kvcli.policies.scoring.lookahead_queries import QueryScored
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class Snap(QueryScored):
    """SnapKV (Li et al., 2024, arXiv 2404.14469): keeps the tokens that the newest queries attend to, and neighbours.

    With 50% of the tokens, the demo model's accuracy is 0.535, or 0.42 less than with all (measurements/policies.md).
    """

    queries: Annotated[int, Range(1)] = 32  # newest tokens whose queries score the others
    pool: Annotated[int, Range(1)] = 7  # positions over which scores are pooled; odd
    pooling: Literal["max", "avg"] = "max"  # maximum or average

    name: ClassVar[str] = "snap"
    by: ClassVar[str] = "attention from its end"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool % 2 == 0:
            raise ValueError(f"pool = {self.pool} has no middle: use an odd number")

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the mean attention of the newest `queries`, pooled over `pool` positions."""
        from kvcli.policies.scoring.token_units import pooled

        return pooled(at.mass(s), s.pos, at.n, self.pool, self.pooling)
