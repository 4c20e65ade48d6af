"""No eviction: every token is kept. This is the reference for all policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.engine.policy.policy import PerLayerPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class KeepAll(PerLayerPolicy):
    """No eviction (kvcli's own): keeps every token. Not measured here: it is the baseline of other policies."""

    compression_interval = None
    splits_heads = True

    def mask(self, s: Slots, at: LayerContext) -> Tensor:
        return s.pos >= 0
