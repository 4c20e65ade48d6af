"""Answers of several text sessions at the same time, in one engine or each in a thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING, Any

from kvcli.api import Event, Events, Turn

if TYPE_CHECKING:
    from kvcli.engine.engine import Engine
    from kvcli.engine.forward_request import Coroutine


class SideBySide:
    """Answers that run together, each in a text session of its own. Reading the events of one runs them all."""

    def __init__(self, engine: Engine | Threads) -> None:
        """`engine`: runs the answers, as from `new_engine` of their sessions."""
        self._engine = engine

    def add(self, answer: Coroutine[Event, Turn], hear: Callable[[Event], object] = lambda event: None) -> Events:
        """Begin an answer, and return its events, which may be read later. `hear` is called with each at once."""
        said = deque[Event | Exception | None]()  # at the end the error, or None

        def work() -> Coroutine[Event, None]:
            error = None
            try:
                yield from answer
            except Exception as raised:
                error = raised
            said.append(error)

        def take(event: Any) -> None:
            said.append(event)
            try:
                hear(event)
            except Exception as error:
                said.append(error)
                raise

        self._engine.add(work(), take)
        return self._events(said)

    def step(self) -> object:
        """Run one engine step, or wait a moment."""
        return self._engine.step()

    def _events(self, said: deque[Event | Exception | None]) -> Events:
        while True:
            while not said:
                self.step()
            if (event := said.popleft()) is None:
                return
            if isinstance(event, Exception):
                raise event
            yield event


class Threads:
    """An engine for answers that other processes compute: a thread waits for each."""

    def add(self, answer: Coroutine[Event, None], outbox: Callable[[Event], object]) -> None:
        """Begin an answer, whose events `outbox` gets in the thread."""
        Thread(target=lambda: deque(map(outbox, answer), maxlen=0), daemon=True).start()  # type: ignore[arg-type]

    def step(self) -> None:
        time.sleep(0.02)
