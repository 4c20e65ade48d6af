"""Pruning schedule: the layers that prune, and the shares they keep; five numbers as in LazyLLM (arXiv 2407.14057)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from kvcli.methods.prune.protected_tokens import PruneSettings, below_all, nearest
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.hf.lm import LM
    from kvcli.methods.prune.pruned_prefill import PrunedPrefill


@dataclass(frozen=True)
class Schedule(PruneSettings):
    """Pruning layers at even distances, with shares on a line between the first and the last of them."""

    start_prune_layer: Annotated[float, Range(above=0, below=1)] = 0.3  # first layer that prunes, as a share of depth
    end_prune_layer: Annotated[float, Range(above=0, below=1)] = 0.9  # last layer that prunes, as a share of depth
    num_prune: Annotated[int, Range(1)] = 3  # layers that prune, evenly spaced
    start_keep_ratio: Annotated[float, Range(above=0, most=1)] = 0.7  # share of tokens that continues at the first one
    end_keep_ratio: Annotated[float, Range(above=0, most=1)] = 0.3  # share of tokens that continues at the last one
    ratio_of: Literal["prompt", "current"] = "prompt"  # tokens these are shares of; current = those in the layer below

    def __post_init__(self) -> None:
        if self.end_prune_layer < self.start_prune_layer:
            raise ValueError(f"end_prune_layer = {self.end_prune_layer} is below start_prune_layer")
        if self.end_keep_ratio > self.start_keep_ratio and self.ratio_of == "prompt":
            raise ValueError(f"end_keep_ratio = {self.end_keep_ratio} is above start_keep_ratio: it must not be")

    @property
    def describe_read(self) -> str:
        """Share of a long prompt that is run through all layers, in words."""
        return f"{self.last:.0%} of a prompt{self._long} in the upper layers"

    @property
    def _long(self) -> str:
        return f" of {self.min_prompt:,} tokens or more" if self.min_prompt > 1 else ""

    @property
    def last(self) -> float:
        """Share of a prompt that reaches the last layer."""
        shares = [self.start_keep_ratio + self._step * i for i in range(self.num_prune)]
        return math.prod(shares) if self.ratio_of == "current" else self.end_keep_ratio

    def describe(self, lm: LM) -> str:
        """Describe the pruning layers and the protected tokens. Raises BadModel if no layer can score tokens."""
        cuts = self.cuts(lm)
        shares = ", ".join(f"{share:.0%} continue from layer {layer}" for layer, share in cuts.items())
        wanted = {nearest(range(1, lm.n_layers), at) for at in self._wanted(lm.n_layers)}
        why = "because the layer below must attend to the whole text"
        moved = f" (not {', '.join(map(str, sorted(wanted)))}, {why})" if wanted != set(cuts) else ""
        return f"of a prompt{self._long} {shares}{moved}; {self.always}"

    def companion(self, pair: ModelPair) -> PrunedPrefill:
        """Return the companion of a sequence that prunes its prompts."""
        from kvcli.methods.prune.pruned_prefill import PrunedPrefill

        return PrunedPrefill(pair, self)

    def cuts(self, lm: LM) -> Mapping[int, float]:
        """Return the share of tokens that continue, by pruning layer. A scheduled layer is replaced by the nearest one
        that can score if the layer below does not attend to the whole sequence.
        """
        shown = below_all(lm)
        first, last = self._ends(lm.n_layers)
        found = {}
        for at in self._wanted(lm.n_layers):
            layer = nearest(shown, at)
            along = 0.0 if last == first else min(1.0, max(0.0, (layer - first) / (last - first)))
            found[layer] = self.start_keep_ratio + (self.end_keep_ratio - self.start_keep_ratio) * along
        return found

    def _wanted(self, n_layers: int) -> list[float]:
        """Return the pruning layers of the schedule, before replacing those that cannot score."""
        first, last = self._ends(n_layers)
        return [first + (last - first) * i / max(1, self.num_prune - 1) for i in range(self.num_prune)]

    def _ends(self, n_layers: int) -> tuple[float, float]:
        return self.start_prune_layer * n_layers, self.end_prune_layer * n_layers

    @property
    def _step(self) -> float:
        return (self.end_keep_ratio - self.start_keep_ratio) / max(1, self.num_prune - 1)
