"""Random token pruning on LazyLLM's schedule: the baseline for pruning methods at the same cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.methods.prune.layer_pruner import LayerPruner
from kvcli.methods.prune.schedule import Schedule
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.forward_request import Rows
    from kvcli.engine.prefill.layerwise import ActiveRows
    from kvcli.engine.sequence.session import GenerationSession


@dataclass(frozen=True)
class Random(Schedule):
    """Random pruning (kvcli's own), a baseline: prunes as many tokens as `lazy` does, chosen at random.

    Prefill of SmolLM2 is 1.5 times as fast, and lookups lose 63.9 points of accuracy (measurements/lab-log.md).
    """

    seed: Annotated[int, Range(0, 2**31 - 1)] = 0  # random seed

    def bind(self, pair: ModelPair, text: GenerationSession, rows: Rows, must: set[int]) -> LayerPruner | None:
        """Return the pruner, or None for a short prompt."""
        if rows.n_rows < self.min_prompt:
            return None
        import torch

        def lots(layer: int, live: ActiveRows) -> Tensor:
            dice = torch.Generator().manual_seed(self.seed + 1_000_003 * rows.pos[0] + layer)
            return torch.rand(len(live.rows), generator=dice)

        n = rows.n_rows if self.ratio_of == "prompt" else 0
        return LayerPruner(self.cuts(pair.target), lots, must, n)
