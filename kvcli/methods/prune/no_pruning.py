"""No token pruning: every token of a prompt is run through every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.kv.footprint import Footprint, ModelSizes

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.hf.lm import LM


@dataclass(frozen=True)
class NoPruning:
    """No pruning (kvcli's own): all tokens run through every layer. Not measured here: it is the baseline."""

    describe_read = ""
    compression_interval = None

    def footprint(self, n: int, of: ModelSizes) -> Footprint:
        return Footprint()

    def describe(self, lm: LM) -> str:
        """Return "": no pruning."""
        return ""

    def companion(self, pair: ModelPair) -> None:
        """Return None: no prompt is pruned."""
