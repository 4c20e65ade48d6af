"""L2 norm: keep slots with the smallest key norms, which tend to get attention (Devoto et al., arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcli.policies.scoring.topk import Alloc, TopK

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class KNorm(TopK):
    """Keep tokens with the smallest key norms (L2 norm, arXiv 2406.11430): cheap, worse than random on retrieval."""

    alloc: Alloc = "uniform"

    name: ClassVar[str] = "knorm"
    by: ClassVar[str] = "small norms of its keys"
    is_share: ClassVar[bool] = False

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return minus the L2 norm of each key."""
        from kvcli.policies.scoring.token_units import norm

        return -norm(s.k)
