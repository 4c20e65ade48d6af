"""The draft model protocol: a separate model, or the target model run at lower cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvcli.engine.forward_request import NeededTensors

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import DraftContext
    from kvcli.engine.forward_request import ChosenRows, Passes, RanRow
    from kvcli.engine.stats import Step
    from kvcli.kv.slots import Usage


class DraftModel(Protocol):
    """Draft model: follows a sequence and proposes its next tokens by draft passes. Methods with a body are those of a
    model without a KV cache and prefill of its own.

    Call order: `start`, then in each pass `bind`, `catch_up`, and `continue_from` as often as draft tokens save time.
    `observe` and `extend` report which draft tokens were accepted.
    """

    @property
    def name(self) -> str:
        """Name of the draft model, for users."""

    @property
    def limit(self) -> int:
        """Context window of the draft model, in tokens."""

    @property
    def length(self) -> int:
        """Tokens of the sequence."""

    @property
    def n_uncovered(self) -> int:
        """Tokens of the sequence that are not covered: `catch_up` must prefill them."""

    @property
    def max_depth(self) -> int:
        """Maximum depth of draft tokens after the whole sequence is covered: positions left in the context window."""
        return self.limit - self.length

    @property
    def needs(self) -> NeededTensors:
        """Tensors of the next step that it reads; the states are the same for every step."""
        return NeededTensors()

    def newest(self, n: int) -> list[int]:
        """Return the last n tokens, or as many as one trial pass can compare."""

    def usage(self) -> list[Usage]:
        """Return the memory of the draft model's KV cache."""
        return []

    def start(self, ids: Sequence[int]) -> None:
        """Set the sequence to `ids`."""

    def extend(self, new: Sequence[int]) -> None:
        """Append `new` to the sequence."""

    def discard_cache(self) -> None:
        """Discard the stored KV, which may be incomplete; no token is covered afterwards."""

    def bind(self, context: DraftContext | None) -> None:
        """Set the target model's cache of the sequence, before the coming passes read from it."""
        return

    def observe(self, step: Step) -> None:
        """Record one pass of the target model; `extend` follows."""
        return

    def prefill(self) -> Passes[None]:
        """Prefill a prompt except for its last token."""
        yield from ()

    def catch_up(self, want: int = 1, most: float = math.inf) -> Passes[list[list[float]]]:
        """Cover the sequence to its end by a prefill of at most `most` of its newest tokens -> the hook output of the
        last `want` rows; empty if hidden states of the next step are needed first."""
        ((result, row),) = yield from self.draft_ahead(())
        return [result.hook_output(row)]

    def draft_ahead(self, rows: ChosenRows) -> Passes[Sequence[RanRow]]:
        """Cover the sequence, whose last row is the root, and run these rows while passes are captured -> what ran, the
        root first. () = no pass is run: use `catch_up`."""
        yield from ()
        return ()

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Passes[list[list[float]]]:
        """Draft further and return the hook output of these rows. `parents`: index of the draft token that each row
        follows, counted from the first since `catch_up`; -1 = the sequence."""
