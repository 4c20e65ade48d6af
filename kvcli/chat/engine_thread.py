"""An engine in a thread that the tasks of event loops share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import get_ident
from typing import Any

from kvcli.engine.engine import Engine
from kvcli.engine.forward_request import Coroutine, E, T


class EngineThread:
    """A thread that runs engine steps while there is work. It starts with the first work and ends with the model."""

    def __init__(self) -> None:
        self._engine = Engine()
        self._pool: ThreadPoolExecutor | None = None
        self._ident: int | None = None  # id of the thread
        self._is_turning = False

    async def events(self, work: Coroutine[E, T]) -> AsyncGenerator[E]:
        """Yield the events of `work`; raises the error of `work`.

        Closing the generator, or cancelling the task that reads it, ends `work` between two passes. A task that reads
        slowly delays no other sequence: its events are queued, at most those of one answer.
        """
        loop, said, failed = asyncio.get_running_loop(), asyncio.Queue[E | None](), list[BaseException]()

        def tell(what: E | None) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(said.put_nowait, what)

        def to_its_end() -> Coroutine[E, T | None]:
            try:
                return (yield from work)
            except BaseException as error:
                failed.append(error)
                raise
            finally:
                tell(None)

        self._pool = pool = self._pool or ThreadPoolExecutor(1, "kvcli-engine")
        joined = pool.submit(self._join, to_its_end(), tell)
        try:
            while (event := await said.get()) is not None:
                yield event
            if failed:
                raise failed[0]
        finally:
            leaves = pool.submit(lambda: joined.result().cancel())
            await asyncio.shield(asyncio.wrap_future(leaves))  # afterwards the text session is free again

    def between_rounds(self, act: Callable[[], object], *, waits: bool = True) -> None:
        """Run `act`, which changes a sequence, between two engine steps and wait for it, unless `waits` is False."""
        if self._pool is None or get_ident() == self._ident:
            act()
        elif (done := self._pool.submit(act)) and waits:
            done.result()

    async def apart(self, act: Callable[[], object]) -> None:
        """Like `between_rounds`, without blocking the event loop. Cancelling the task does not stop `act`."""
        if self._pool is None:
            act()
        else:
            await asyncio.shield(asyncio.wrap_future(self._pool.submit(act)))

    def _join(self, work: Coroutine[Any, Any], tell: Callable[[Any], object]) -> Any:
        self._ident = get_ident()
        task = self._engine.add(work, tell)
        if not self._is_turning:
            self._is_turning = True
            self._round()
        return task

    def _round(self) -> None:
        """Run one engine step, then queue the next after tasks that joined or left meanwhile."""
        try:
            self._is_turning = self._engine.step()
        finally:
            if self._is_turning and self._pool is not None:
                self._pool.submit(self._round)
