"""TOVA: score slots by attention of the newest query, averaged over a layer's heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcli.policies.scoring.lookahead_queries import QueryScored
from kvcli.policies.scoring.topk import Alloc

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class Tova(QueryScored):
    """TOVA (Oren et al., 2024, arXiv 2401.06104): keeps the tokens that the newest query attends to, in all heads.

    With 50% of the tokens, the demo model's accuracy is 0.368, or 0.587 less than with all (measurements/policies.md).
    """

    alloc: Alloc = "uniform"

    name: ClassVar[str] = "tova"
    by: ClassVar[str] = "attention from its last token"
    splits_heads: ClassVar[bool] = False  # its score is a mean over heads
    queries: ClassVar[int] = 1  # the newest

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the attention of the newest query, averaged over the heads of the layer."""
        from kvcli.policies.scoring.token_units import by_position

        one = at.mass(s)
        held = by_position((s.pos >= 0).to(one.dtype), s.pos, at.n, 0.0).sum(0)
        mean = by_position(one, s.pos, at.n, 0.0).sum(0) / held.clamp_min(1)
        return mean.gather(0, s.pos.clamp(min=0).long().flatten()).view_as(one) if mean.numel() else one
