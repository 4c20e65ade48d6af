"""What makes the passes that guesses come from: a second model, or the one that writes in some cheaper way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import DraftContext
    from kvcli.engine.forward_request import Steps
    from kvcli.engine.rows import Hears
    from kvcli.engine.stats import Step
    from kvcli.kv.slots import Usage


class DraftModel(Protocol):
    """Follows a text, and says by passes of its own what may come next.

    `start`, then in each pass `bind`, `catch_up`, and `continue_from` as often as guesses pay; `observe` and `extend`
    tell what became of them.
    """

    @property
    def name(self) -> str:
        """Of what drafts, for people."""

    @property
    def limit(self) -> int:
        """Tokens that it was made for."""

    @property
    def length(self) -> int:
        """Tokens of the text."""

    @property
    def n_uncovered(self) -> int:
        """Those of them that are not covered: what `catch_up` has to read."""

    @property
    def max_depth(self) -> int:
        """How deep guesses may be, once the text is read."""

    @property
    def needs(self) -> Hears:
        """What the next step is to hand back of its rows; "" = nothing."""

    def newest(self, n: int) -> list[int]:
        """The last n tokens, or as many as it may be asked about at once."""

    def usage(self) -> list[Usage]:
        """What it stores."""

    def start(self, ids: Sequence[int]) -> None:
        """The text is now this one."""

    def extend(self, new: Sequence[int]) -> None:
        """These joined it."""

    def discard_cache(self) -> None:
        """Nothing is read of the text: what is stored may be torn."""

    def bind(self, past: DraftContext | None) -> None:
        """What is stored of the text, before anything is read of it by the coming passes."""

    def observe(self, step: Step) -> None:
        """What one pass of the model that writes did; `extend` follows."""

    def prefill(self) -> Steps[None]:
        """Read a prompt but for its last token."""

    def catch_up(self, want: int = 1, most: float = math.inf) -> Steps[list[list[float]]]:
        """Cover the text to its end, by reading `most` of its newest tokens -> the hook output for the last `want`;
        nothing where the next step has to be heard first."""

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Steps[list[list[float]]]:
        """The hook output for the rows of further guesses. `parents`: which guess each follows, counted from the first
        since `catch_up`; -1 = the text."""
