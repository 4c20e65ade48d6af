"""Token pruning at one layer: all tokens run through the lower layers, the best-scoring ones through the upper layers.

FastKV (Jo et al., arXiv 2502.01068): tokens are scored by attention of the newest rows before one layer, pooled so that
neighbours are kept together. GemFilter (Shi et al., arXiv 2409.17422), `again`: the lower layers are run for scoring
only, and the selected tokens are prefilled again through all layers, attending only to each other. They keep their
positions here; the paper renumbers them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from kvcli.methods.prune.layer_pruner import LayerPruner, at_first, attention_mass, pooled
from kvcli.methods.prune.protected_tokens import PruneSettings, below_all, nearest
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.forward_request import Passes, Rows
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.layerwise import ActiveRows, Pruner
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.kv.slots import KVCache
    from kvcli.methods.prune.pruned_prefill import PrunedPrefill


@dataclass(frozen=True)
class SingleCut(PruneSettings):
    """FastKV (Jo et al., 2025, arXiv 2502.01068) or GemFilter (arXiv 2409.17422): prunes a prompt at one layer.

    Prefill of SmolLM2 is 1.52 times as fast, and lookups lose 5.56 points of accuracy (measurements/lab-log.md).
    """

    layer: Annotated[float, Range(above=0, below=1)] = 0.5  # layer that prunes, as a share of depth
    keep: Annotated[float, Range(above=0, most=1)] = 0.2  # share of the prompt that continues
    window: Annotated[int, Range(1)] = 8  # newest tokens whose queries score the others
    pool: Annotated[int, Range(1)] = 7  # neighbours over which scores are max-pooled; odd
    again: bool = False  # prefill the selected tokens again through all layers, without the others (GemFilter)

    def __post_init__(self) -> None:
        if self.pool % 2 == 0:
            raise ValueError(f"pool = {self.pool}: as many neighbours on either side make an odd number")

    @property
    def n_scoring_rows(self) -> int:
        """Newest rows whose queries score the others."""
        return self.window

    @property
    def describe_read(self) -> str:
        """Share of a long prompt that is run through all layers, in words."""
        layers = "all" if self.again else "the upper"
        return f"{self.keep:.0%} of a prompt of {self.min_prompt:,} tokens or more in {layers} layers"

    def describe(self, lm: LM) -> str:
        """Describe the layer that prunes, in words. Raises BadModel if the model has no layer to score tokens in."""
        cut = self.at(lm)
        how = f"through all layers, scored by the first {cut}" if self.again else f"from layer {cut}"
        return f"of a prompt of {self.min_prompt:,} tokens or more {self.keep:.0%} continue {how}; {self.always}"

    def at(self, lm: LM) -> int:
        """Return the first layer run with fewer tokens."""
        return nearest(below_all(lm), self.layer * lm.n_layers)

    def companion(self, pair: ModelPair) -> PrunedPrefill:
        """Return the companion of a sequence that prunes its prompts."""
        from kvcli.methods.prune.pruned_prefill import PrunedPrefill

        return PrunedPrefill(pair, self)

    def bind(self, pair: ModelPair, text: GenerationSession, rows: Rows, must: set[int]) -> Passes[Pruner | None]:
        """Return the pruner, or None for a short prompt. Raises BadModel if no layer can score tokens."""
        n, lm, cache = rows.n_rows, pair.target, text.cache
        if n < self.min_prompt:
            return None
        cut = self.at(lm)
        once = LayerPruner({cut: self.keep}, partial(self._judge, lm, cache, rows), must, n)
        if not self.again:
            return once
        from kvcli.engine.prefill.layerwise import LayerwisePrefill

        look = LayerwisePrefill(lm, cache, rows, text.chunk_rows, range(max(0, n - self.window), n), may_revive=True)
        try:
            while look.layer < cut:
                yield from look.step()
            chosen = once(cut, look.active_rows)
        finally:
            cache.crop(rows.pos[0])
        return partial(at_first, chosen or range(n))

    def _judge(self, lm: LM, cache: KVCache, rows: Rows, layer: int, live: ActiveRows) -> Tensor:
        scores = attention_mass(lm, cache, layer, live, rows.pos, min(self.window, rows.n_rows))[rows.pos[0] :]
        return pooled(scores, self.pool)
