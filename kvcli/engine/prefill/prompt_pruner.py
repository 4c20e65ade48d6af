"""Protocol of prompt pruning: which tokens continue between layers, and the data to select them by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.forward_request import NewKV, Steps
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import ProtectedTokens
    from kvcli.engine.prefill.aux_cache import AuxCache
    from kvcli.engine.rows import Rows
    from kvcli.kv.slots import KVCache


@dataclass(frozen=True, slots=True)
class ActiveRows:
    """The rows that reached a layer, all of which ran through the layer below."""

    rows: Sequence[int]  # rising
    fresh: NewKV | None  # new KV of the layer below; None before the first layer, or if it is committed already
    queries: Tensor | None  # [H, n, D], queries of the recorded rows there


# For one prompt: a layer and the rows that reached it -> the rows that continue, at least one and all recorded ones;
# None = all. A deferred row runs through none of the later layers (LazyLLM, arXiv 2407.14057).
Pruner = Callable[[int, ActiveRows], Sequence[int] | None]

# a layer, the rows that reached it and their positions -> positions that continue, and positions to revive
Choose = Callable[[int, ActiveRows, Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class PromptPruning(Protocol):
    """Protocol of the `[prune]` table of a profile, shared by all sequences."""

    @property
    def describe_read(self) -> str:
        """Describe how much of a long prompt runs through all layers, in words; "" = all of it."""

    def describe(self, lm: LM) -> str:
        """Describe the effect on prompts of this model, in words; "" = none. Raises BadModel if the model is not
        supported."""

    @property
    def n_scoring_rows(self) -> int:
        """Number of newest rows whose queries score the others."""

    @property
    def compression_interval(self) -> int | None:
        """Tokens of an answer between two compression points that may revive tokens; None = deferred tokens are
        dropped."""

    @property
    def revives_before_prompt(self) -> bool:
        """True if all deferred tokens are revived before the next prefill."""

    def n_deferred(self, n: int) -> int:
        """Return how many of n tokens are stored as one hidden state at most. Memory is planned with it."""

    @property
    def guard(self) -> ProtectedTokens:
        """Tokens that run through every layer whatever their score."""

    def group_size(self, n: int, chunk: int) -> int:
        """Return how many of the n remaining prompt tokens are scored together."""

    def bind(
        self, lm: LM, cache: KVCache, rows: Rows, must: set[int], part: int
    ) -> Steps[Pruner | None] | Pruner | None:
        """Return the pruner for a prefill of these rows, perhaps after a scoring pass; None = all rows continue.

        `must`: rows that run through every layer: protected and recorded ones. `part`: most rows of a pass.
        """

    def bind_revival(self, lm: LM, cache: KVCache, aux_cache: AuxCache) -> Choose:
        """Return the function that selects tokens to revive in a pass of the newest token (revival_pass.py). Called
        only if `every` is set."""
