"""Text sessions that keep their KV cache between the requests of a server, found by the prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvcli import assemble

if TYPE_CHECKING:
    from kvcli.api import Prompt
    from kvcli.chat.model import Model
    from kvcli.chat.text_session import TextSession
    from kvcli.settings.profile import Profile


class WarmSessions:
    """The text sessions of a model that answer requests of clients without state.

    A request gets the idle session of its profile whose KV cache begins like the prompt, or a new one that copies what
    another has. Answers are those of a new session: under a profile that changes KV, none is used twice. All methods
    belong to one event loop.
    """

    def __init__(self, model: Model, idle_bytes: int) -> None:
        """`idle_bytes`: most bytes of KV of sessions that answer no request; the oldest session is closed first."""
        self._model, self._idle_bytes = model, idle_bytes
        self._idle: list[TextSession] = []  # oldest first

    @asynccontextmanager
    async def session(
        self, prompt: Prompt, profile: str | Profile | None = None, set: Mapping[str, object] | None = None
    ) -> AsyncGenerator[TextSession]:
        """Lend a session for one answer to `prompt`; afterwards it is idle. `profile` and `set` are as in `Model.open`.

        Raises BadConfig for a profile that changes `load`.
        """
        session = self._idle_session(prompt, self._model.open(profile, set))
        try:
            yield session
        finally:
            await session.aend()
            if assemble.is_lossless(session.profile) and session.nbytes:
                self._idle.append(session)
            else:
                await session.aclose()
            while self._idle and sum(one.nbytes for one in self._idle) > self._idle_bytes:
                await self._idle.pop(0).aclose()

    def _idle_session(self, prompt: Prompt, new: TextSession) -> TextSession:
        """Return the idle session that shares most of the prompt, unless it would lose more tokens than it shares."""
        ids = new.model.encode(prompt)
        self._idle = [one for one in self._idle if one.nbytes]  # the engine drops KV when it lacks memory
        shared = {one: one.session.shared(ids) for one in self._idle if one.profile.hash == new.profile.hash}
        best = max(shared, key=shared.__getitem__, default=new)
        if best is new or 2 * shared[best] < len(best.session.ids):
            return new
        self._idle.remove(best)
        return best

    async def aclose(self) -> None:
        """Close all idle sessions."""
        while self._idle:
            await self._idle.pop().aclose()
