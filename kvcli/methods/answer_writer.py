"""The protocol of objects that write answers in place of plain decoding."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Passes
    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.engine.stats import Step
    from kvcli.kv.slots import Usage


class AnswerWriter(Protocol):
    """A writer of one sequence's answers, as a method of `[reasoning_steps]` or `[decode]` makes it."""

    def step(self, session: GenerationSession, stop: Collection[int], most: float) -> Passes[Step]:
        """Add at least one and at most `most` tokens, up to the first in `stop`; else as `GenerationSession.step`."""

    def usage(self) -> list[Usage]:
        """Return the memory that it holds between two steps."""
