"""Answers of several text sessions that run together in this thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcli.api import Event, Events, Turn

if TYPE_CHECKING:
    from kvcli.engine.engine import EngineTask
    from kvcli.engine.forward_request import Coroutine


class SideBySide:
    """Answers that run together, each in a text session of its own. Reading the events of one runs them all."""

    def __init__(self) -> None:
        from kvcli.engine.engine import Engine  # late: it imports torch, and a plan of parts needs none

        self._engine = Engine()

    def add(self, answer: Coroutine[Event, Turn], hear: Callable[[Event], object] = lambda event: None) -> Events:
        """Begin an answer, and return its events, which may be read later. `hear` is called with each at once."""
        said = deque[Event]()

        def take(event: Event) -> None:
            said.append(event)
            hear(event)

        return self._events(self._engine.add(answer, take), said)

    def step(self) -> bool:
        """Run one engine step. False if no answer is left."""
        return self._engine.step()

    def _events(self, task: EngineTask[Event, Turn], said: deque[Event]) -> Events:
        while said or not task.is_over:
            if said:
                yield said.popleft()
            else:
                self.step()
        task.result()  # raises the error that ended it
