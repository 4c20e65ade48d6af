"""Answers of several text sessions at the same time, in one engine or each in a thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING

from kvcli.api import Event, Events, Turn

if TYPE_CHECKING:
    from kvcli.engine.engine import Engine, EngineTask
    from kvcli.engine.forward_request import Coroutine


class SideBySide:
    """Answers that run together, each in a text session of its own. Reading the events of one runs them all."""

    def __init__(self, engine: Engine | Threads) -> None:
        """`engine`: runs the answers, as from `new_engine` of their sessions."""
        self._engine = engine

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

    def _events(self, task: EngineTask[Event, Turn] | ThreadTask, said: deque[Event]) -> Events:
        while not task.is_over or said:  # in this order: a thread may say its last event between both
            if said:
                yield said.popleft()
            else:
                self.step()
        task.result()  # raises the error that ended it


class ThreadTask(Thread):
    """An answer in a thread."""

    def __init__(self, answer: Coroutine[Event, Turn], outbox: Callable[[Event], object]) -> None:
        super().__init__(daemon=True)
        self._answer, self._outbox = answer, outbox
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for event in self._answer:
                self._outbox(event)  # type: ignore[arg-type]  # there are no forward requests
        except Exception as error:
            self._error = error

    @property
    def is_over(self) -> bool:
        return not self.is_alive()

    def result(self) -> None:
        """Raise the error that ended the answer."""
        if self._error is not None:
            raise self._error


class Threads:
    """An engine for answers that other processes compute: a thread waits for each."""

    add = staticmethod(ThreadTask)

    def step(self) -> bool:
        """Wait a moment."""
        time.sleep(0.02)
        return True
