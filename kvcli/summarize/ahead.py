"""Answers about the next parts, begun while an earlier part is answered: several at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcli.chat.side_by_side import SideBySide

if TYPE_CHECKING:
    from kvcli.api import Cancel, Event, Events, Turn
    from kvcli.chat.text_session import TextSession
    from kvcli.engine.forward_request import Coroutine


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt with the options of its answer."""

    ids: list[int]
    options: dict[str, Any]
    ended: Callable[[Turn], object] = lambda turn: None  # called when the answer has ended


class Ahead(SideBySide):
    """Sessions that answer prompts in their order, each the next one as soon as it is free."""

    def __init__(
        self,
        sessions: Sequence[TextSession],
        prompts: Iterator[Asked],
        cancel: Cancel,
        ended: Callable[[TextSession, Turn], object] = lambda session, turn: None,
    ) -> None:
        """`prompts` is read as sessions become free, until `cancel`. `ended` is called before a session goes on."""
        super().__init__(sessions[0].new_engine())
        self._free, self._prompts, self._cancel, self._ended = [*sessions], prompts, cancel, ended
        self._begun: dict[tuple[int, ...], Events] = {}
        self.n_running = 0

    def stream(self, ids: Sequence[int], **options: Any) -> Events:
        """Yield the events of the answer to a prompt. If it has not begun, it begins once a session is free."""
        self._fill()
        if not self.has_begun(ids):
            while not self._free:
                self.step()
            self._begin(Asked([*ids], options))
        yield from self._begun.pop(tuple(ids))

    def has_begun(self, ids: Sequence[int]) -> bool:
        """True if the answer to this prompt was begun, and is not read yet."""
        return tuple(ids) in self._begun

    def step(self) -> object:
        self._fill()
        return super().step()

    def _fill(self) -> None:
        while self._free and not self._cancel() and (asked := next(self._prompts, None)) is not None:
            if not self.has_begun(asked.ids):
                self._begin(asked)

    def _begin(self, asked: Asked) -> None:
        session, self.n_running = self._free.pop(0), self.n_running + 1
        self._begun[tuple(asked.ids)] = self.add(self._answer(session, asked))

    def _answer(self, session: TextSession, asked: Asked) -> Coroutine[Event, Turn]:
        try:
            turn = yield from session.answer(asked.ids, **asked.options)
            asked.ended(turn)
            self._ended(session, turn)
            return turn
        finally:
            self.n_running -= 1
            self._free.append(session)
