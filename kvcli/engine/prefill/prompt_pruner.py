"""What says which tokens of a text go on between layers, and what it is shown before it does."""

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
    """Rows that have come to a layer, all of them through the one below."""

    rows: Sequence[int]  # rising
    fresh: NewKV | None  # what the layer below made of them; None before the first, and where that is stored already
    queries: Tensor | None  # [H, n, D], of the heard rows there


# Of one prompt: a layer that it has come to -> those of its rows that go on into it, at least one and all that are
# heard; None = all. Who stays behind goes into no layer from there on (LazyLLM, arXiv 2407.14057).
Pruner = Callable[[int, ActiveRows], Sequence[int] | None]

# a layer, and what the one below made of tokens at these positions -> those of them that go on, and who comes back
Choose = Callable[[int, ActiveRows, Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class PromptPruning(Protocol):
    """The `[prune]` table of a profile, shared by all texts."""

    @property
    def describe_read(self) -> str:
        """How much of a long prompt goes through all layers, in words; "" = all of it."""

    def describe(self, lm: LM) -> str:
        """What it does to prompts of this model, in words; "" = nothing. Raises BadModel where it can judge none."""

    @property
    def n_scoring_rows(self) -> int:
        """Newest rows of what is read whose queries it judges by."""

    @property
    def compression_interval(self) -> int | None:
        """Tokens of an answer between two boundaries at which some may come back; None = what stays behind is gone."""

    @property
    def revives_before_prompt(self) -> bool:
        """Whether those that are still behind come back before the next prompt is read."""

    def n_deferred(self, n: int) -> int:
        """Of n tokens, how many are kept as one hidden vector at most: what memory is planned with."""

    @property
    def guard(self) -> ProtectedTokens:
        """Tokens that go through every layer whatever it judges."""

    def group_size(self, n: int, chunk: int) -> int:
        """How many of the n tokens that are left of a prompt it judges together."""

    def bind(
        self, lm: LM, cache: KVCache, rows: Rows, must: set[int], part: int
    ) -> Steps[Pruner | None] | Pruner | None:
        """For reading these rows behind what is stored, perhaps after a look at them; None = all of them go on.

        `must`: rows that go through every layer: what the guard covers, and those that are heard. `part`: rows of a
        pass at most.
        """

    def bind_revival(self, lm: LM, cache: KVCache, behind: AuxCache) -> Choose:
        """Who comes back on a trip that the newest token makes for that alone (revival_pass.py). Asked where
        `compression_interval` is set."""
