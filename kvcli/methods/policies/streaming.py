"""Sinks and the newest tokens: StreamingLLM (Xiao et al., arXiv 2309.17453).

Positions stay those of the text: the paper renumbers tokens inside its cache so that a model can run past the length
it was trained for, which here is refused before a token is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.engine.policy.policy import PerLayerPolicy, ProtectedTokens
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class StreamingLLM(PerLayerPolicy):
    """Keep the first tokens and the newest ones (StreamingLLM)."""

    sinks: Annotated[int, Range(0)] = 4  # first tokens, which every later one leans on
    window: Annotated[int, Range(1)] = 1020  # newest tokens
    compression_interval: Annotated[int, Range(1)] = 64  # tokens between two evictions while answering

    def slots(self, n: int) -> int:
        """Of n tokens, the sinks and the window."""
        return min(n, self.sinks + self.window)

    @property
    def describe_kept(self) -> str:
        return f"the first {self.sinks} tokens and the newest {self.window:,}"

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        """The same in every layer and head: positions below `sinks`, and the last `window` of them."""
        return ProtectedTokens(self.sinks, self.window).covers(s.pos, at.kinds)
