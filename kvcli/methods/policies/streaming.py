"""StreamingLLM: keep attention sinks and the newest tokens.

Positions are those of the sequence. The paper renumbers tokens inside its cache so that a model can run past its
trained length; here such a length is refused before prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.engine.policy.policy import PerLayerPolicy, ProtectedTokens
from kvcli.kv.footprint import NO_SIZES, Footprint, ModelSizes
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class StreamingLLM(PerLayerPolicy):
    """StreamingLLM (Xiao et al., 2023, arXiv 2309.17453): keeps the first tokens and the newest ones.

    With 50% of the tokens, the demo model's accuracy is 0.625, or 0.33 less than with all (measurements/policies.md).
    """

    sinks: Annotated[int, Range(0)] = 4  # first tokens (attention sinks), always kept
    window: Annotated[int, Range(1)] = 1020  # newest tokens kept
    compression_interval: Annotated[int, Range(1)] = 64  # generated tokens between two compression points

    splits_heads: ClassVar[bool] = True

    def footprint(self, n: int, of: ModelSizes = NO_SIZES) -> Footprint:
        kept = min(n, self.sinks + self.window)
        return Footprint(kept, kept, says=f"the first {self.sinks} tokens and the newest {self.window:,}")

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        """Select positions below `sinks` and the last `window` positions, in every layer and head."""
        return ProtectedTokens(self.sinks, self.window).covers(s.pos, at.kinds)
