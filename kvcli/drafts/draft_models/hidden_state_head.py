"""Common base of draft heads that read hidden states of the target model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.drafts.draft_models.draft_model import DraftModel
from kvcli.engine.forward_request import LAST_STATE

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import DraftContext
    from kvcli.engine.hf.lm import LM


class HiddenStateHead(DraftModel):
    """Draft head over the target model; only the hidden state of the pending token is known."""

    needs: tuple[int, ...] = LAST_STATE

    def __init__(self, lm: LM, head: LM) -> None:
        self._lm, self._head = lm, head
        self._text: list[int] = []
        self._context: DraftContext | None = None
        self.discard_cache()

    @property
    def name(self) -> str:
        return self._head.info.id

    @property
    def limit(self) -> int:
        return self._lm.limit

    @property
    def length(self) -> int:
        return len(self._text)

    def newest(self, n: int) -> list[int]:
        """Return the pending token. Earlier tokens have known successors, and their states are not kept."""
        return self._text[-1:]

    def bind(self, context: DraftContext | None) -> None:
        """Set the target model's cache."""
        self._context = context
