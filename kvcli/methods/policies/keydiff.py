"""KeyDiff: score slots by how dissimilar their keys are from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcli.policies.scoring.topk import TopK

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class KeyDiff(TopK):
    """KeyDiff (Park et al., 2025, arXiv 2504.15364): keeps tokens whose keys are dissimilar from the others.

    With 50% of the tokens, the demo model's accuracy is 0.434, or 0.521 less than with all (measurements/policies.md).
    """

    name: ClassVar[str] = "keydiff"
    by: ClassVar[str] = "how much its keys differ from the others"
    is_share: ClassVar[bool] = False

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return minus the cosine of each key with the mean direction of all keys."""
        from torch.nn import functional

        from kvcli.policies.scoring.token_units import wide

        way = functional.normalize(wide(s.k), dim=2)
        anchor = way.masked_fill((s.pos < 0).unsqueeze(-1), 0.0).sum(1, keepdim=True)  # its length cancels
        return -functional.cosine_similarity(way, anchor, dim=2)
