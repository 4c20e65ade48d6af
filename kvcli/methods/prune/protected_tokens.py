"""Tokens of a prompt that no pruning method may drop, and layers in which tokens can be scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.errors import BadModel
from kvcli.kv.footprint import Footprint, ModelSizes
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.forward_request import Passes, Rows
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import ProtectedTokens
    from kvcli.engine.prefill.layerwise import Pruner
    from kvcli.engine.sequence.session import GenerationSession


@dataclass(frozen=True)
class PruneSettings:
    """Settings shared by all token pruning methods."""

    recent: Annotated[int, Range(1)] = 64  # newest tokens, never pruned
    sinks: Annotated[int, Range(0)] = 4  # first tokens, never pruned
    protect: bool = True  # never prune template tokens, the system prompt and the question
    min_prompt: Annotated[int, Range(1)] = 1024  # prompts with fewer tokens are not pruned

    @property
    def n_scoring_rows(self) -> int:
        """Newest rows whose queries score the others: the last one."""
        return 1

    @property
    def compression_interval(self) -> int | None:
        """None: pruned tokens are not revived."""
        return None

    def footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return nothing: no hidden states of pruned tokens are kept."""
        return Footprint()

    def group_size(self, n: int, chunk: int) -> int:
        """Return how many of the n remaining prompt tokens are prefilled and scored together."""
        return n

    def describe(self, lm: LM) -> str:
        """Describe the effect on prompts of this model, in words. Raises BadModel if the model is not supported."""
        raise NotImplementedError

    def bind(
        self, pair: ModelPair, text: GenerationSession, rows: Rows, must: set[int]
    ) -> Passes[Pruner | None] | Pruner | None:
        """Return the pruner for a prefill of these rows of the sequence, perhaps after scoring passes; None = all
        continue.

        `must`: rows that run through every layer: protected and recorded ones.
        """
        raise NotImplementedError

    @property
    def guard(self) -> ProtectedTokens:
        """Protected tokens: the first, the newest and, with `protect`, instructions (system, tools, question)."""
        from kvcli.engine.policy.policy import ProtectedTokens
        from kvcli.engine.sequence.state import QUESTION, SPECIAL, SYSTEM, TOOLS

        return ProtectedTokens(
            self.sinks, self.recent, frozenset({SPECIAL, SYSTEM, TOOLS, QUESTION} if self.protect else ())
        )

    @property
    def always(self) -> str:
        """Protected tokens, in words."""
        others = ", the template, the system text and the question" if self.protect else ""
        return f"the first {self.sinks} and the newest {self.recent}{others} always do"


def below_all(lm: LM) -> list[int]:
    """Return the layers before which tokens can be scored: the layer below attends to the whole sequence. Raises
    BadModel if there is none.
    """
    from kvcli.kv.slots import layer_groups  # imported late, because loading a profile must not import torch

    lm.recurrent_layers.refuse(lm.info.id, "tokens cannot stop between them", ["--set prune.method=none"])
    starts = [span.start for span in layer_groups(lm.shapes)[1:]]
    shown = [i for i in starts if lm.windows[i - 1] is None and lm.shapes[i - 1].shared_from is None]
    if not shown:
        raise BadModel(
            f"[prune] scores tokens in layers with full attention, and {lm.info.id} has none",
            code="no_pruning",
            try_=["--set prune.method=none"],
        )
    return shown


def nearest(layers: Sequence[int], at: float) -> int:
    """Return the layer nearest to `at`, the lower one of two at equal distance."""
    return min(layers, key=lambda layer: (abs(layer - at), layer))
