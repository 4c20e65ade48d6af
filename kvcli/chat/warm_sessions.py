"""Text sessions that keep their KV cache between the requests of a server, found by the prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvcli.chat.transcript import tokens_of_turn
from kvcli.models.text import encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcli.api import Prompt, Turn
    from kvcli.chat.model import Model
    from kvcli.chat.text_session import TextSession
    from kvcli.settings.profile import Profile


class WarmSessions:
    """The text sessions of a model that answer requests of clients without state.

    A request gets the idle session with the longest KV cache of its prompt's beginning. All methods belong to one
    event loop.
    """

    def __init__(self, model: Model, idle_bytes: int) -> None:
        """`idle_bytes`: most bytes of KV of sessions that answer no request; the oldest session is closed first."""
        self._model, self._idle_bytes = model, idle_bytes

    @asynccontextmanager
    async def session(
        self, prompt: Prompt, profile: str | Profile | None = None, set: Mapping[str, object] | None = None
    ) -> AsyncGenerator[TextSession]:
        """Lend a session for one answer to `prompt`; afterwards it is idle. `profile` and `set` are as in `Model.open`.

        Raises BadConfig for a profile that changes `load`.
        """
        async with self._model.open(profile, set) as session:
            yield session

    def prompt_ids(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a rendered prompt. The answers in it keep the tokens that the model generated, if
        `remember` has them. `special` is as in `kvcli.models.text.encode`."""
        return encode(self._model.tokenizer, text, special)

    def remember(self, text: str, ids: Sequence[int], turn: Turn) -> None:
        """Remember the tokens of an answer to the rendered prompt `text`, which has these ids."""
        tokens_of_turn(self._model.tokenizer, text, ids, turn)

    async def aclose(self) -> None:
        """Close all idle sessions."""
