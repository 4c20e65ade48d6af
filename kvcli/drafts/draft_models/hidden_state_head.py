"""Common base of draft heads, which read hidden states of the target model, and recompute those that are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.drafts.draft_models.draft_model import DraftModel
from kvcli.drafts.draft_models.layer_skip import SEEN, newest_before
from kvcli.engine.forward_request import LAST_STATE, ForwardRequest, NeededTensors, Passes, Rows

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.drafting.drafter import DraftContext
    from kvcli.engine.hf.lm import LM


class HiddenStateHead(DraftModel):
    """Draft head over the target model, whose hidden states it reads; by default that of the pending token alone."""

    needs = NeededTensors(LAST_STATE)

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

    def _hear_again(self) -> Passes[tuple[int, Tensor]]:
        """Return hidden states [n, K E] of the K layers that the head reads, of the newest tokens except the pending
        one, and the position of the first, by a pass of the target model over part of the KV cache."""
        assert self._context is not None, "no KV cache is bound"
        lm, end = self._lm, self.length - 1
        first = max(0, end - SEEN)
        before = newest_before(lm, self._context.cache, first, range(lm.n_layers))
        rows, layers = Rows.chain(self._text[first:end], first), self.needs.states
        result = yield ForwardRequest(lm, rows, before, want=range(rows.n_rows), record_hidden_states=layers)
        assert result.hidden is not None
        return first, result.hidden
