"""Answers about the next parts, begun while an earlier part is answered: several at a time, in one engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcli.api import Cancel, Event, Events, Turn
    from kvcli.chat.text_session import TextSession
    from kvcli.engine.engine import EngineTask
    from kvcli.engine.forward_request import Coroutine


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt with the options of its answer."""

    ids: list[int]
    options: dict[str, Any]
    ended: Callable[[Turn], object] = lambda turn: None  # called when the answer has ended


class Ahead:
    """Sessions that answer prompts in their order, each the next one as soon as it is free. Reading the events of one
    answer runs them all."""

    def __init__(
        self,
        sessions: Sequence[TextSession],
        prompts: Iterator[Asked],
        cancel: Cancel,
        ended: Callable[[TextSession, Turn], object] = lambda session, turn: None,
    ) -> None:
        """`prompts` is read as sessions become free, until `cancel`. `ended` is called before a session goes on."""
        from kvcli.engine.engine import Engine  # late: it imports torch, and a plan of parts needs none

        self._engine, self._free, self._prompts = Engine(), [*sessions], prompts
        self._cancel, self._ended = cancel, ended
        self._begun: dict[tuple[int, ...], tuple[EngineTask[Event, Turn], deque[Event]]] = {}
        self.n_running = 0

    def stream(self, ids: Sequence[int], **options: Any) -> Events:
        """Yield the events of the answer to a prompt. If it has not begun, it begins once a session is free."""
        self._fill()
        while not self.has_begun(ids):
            if self._free:
                self._begin(Asked([*ids], options))
            else:
                self._step()
        task, said = self._begun.pop(tuple(ids))
        while said or not task.is_over:
            if said:
                yield said.popleft()
            else:
                self._step()
        task.result()  # raises the error that ended it

    def has_begun(self, ids: Sequence[int]) -> bool:
        """True if the answer to this prompt was begun, and is not read yet."""
        return tuple(ids) in self._begun

    def _step(self) -> None:
        self._fill()
        self._engine.step()

    def _fill(self) -> None:
        while self._free and not self._cancel() and (asked := next(self._prompts, None)) is not None:
            if not self.has_begun(asked.ids):
                self._begin(asked)

    def _begin(self, asked: Asked) -> None:
        session, self.n_running, said = self._free.pop(0), self.n_running + 1, deque[Any]()
        self._begun[tuple(asked.ids)] = self._engine.add(self._answer(session, asked), said.append), said

    def _answer(self, session: TextSession, asked: Asked) -> Coroutine[Event, Turn]:
        try:
            turn = yield from session.answer(asked.ids, **asked.options)
            asked.ended(turn)
            self._ended(session, turn)
            return turn
        finally:
            self.n_running -= 1
            self._free.append(session)
