"""What heads that follow a text by hidden states of the model that writes have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.engine.rows import Hears

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import DraftContext
    from kvcli.engine.hf.lm import LM


class HiddenStateHead:
    """A head over the model that writes, and the text so far, of which the pending token's state alone is known."""

    needs: Hears = "hidden"

    def __init__(self, lm: LM, head: LM) -> None:
        self._lm, self._head = lm, head
        self._text: list[int] = []
        self._past: DraftContext | None = None
        self.discard_cache()

    def discard_cache(self) -> None:
        """Nothing is known of the text."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        return self._head.info.id

    @property
    def limit(self) -> int:
        return self._lm.limit

    @property
    def length(self) -> int:
        return len(self._text)

    @property
    def max_depth(self) -> int:
        """As deep as the model has positions."""
        return self.limit - self.length

    def newest(self, n: int) -> list[int]:
        """The pending token: of others it is known what came next, and the states are not kept."""
        return self._text[-1:]

    def bind(self, past: DraftContext | None) -> None:
        """What the model that writes has stored."""
        self._past = past
