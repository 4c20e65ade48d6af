"""Server-sent events of an answer, and answers returned as a whole. Protocols differ in their frames only."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from kvcli.api import End, Event, Read, Turn, Waiting
from kvcli.errors import KvcliError
from kvcli.serve.errors import error_body

EVERY = 1.0  # seconds without a frame until a comment is sent: proxies close silent connections
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
HEADERS += [(b"x-accel-buffering", b"no")]  # nginx would hold the frames back

Events = AsyncGenerator[tuple[int, Event]]  # of several answers: number of the answer, event

log = logging.getLogger("kvcli.serve")


class Frames(Protocol):
    """The frames of one streamed response in a protocol."""

    def of(self, index: int, event: Event) -> Iterable[str]:
        """Return the frames of an event of an answer; most events but text, thoughts, calls and `End` have none."""

    def end(self) -> Iterable[str]:
        """Return the frames after the end of all answers."""

    def error(self, error: KvcliError) -> Iterable[str]:
        """Return the frames of an error after which nothing follows."""


def frame(data: object, name: str = "") -> str:
    """Return a frame with JSON data. `name`: of the event, in protocols that have names."""
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {json.dumps(data, ensure_ascii=False)}\n\n"


def error_frame(error: KvcliError) -> str:
    """Return the frame of an error in OpenAI's form."""
    return frame(error_body(error))


async def several(answers: Iterable[AsyncGenerator[Event]]) -> Events:
    """Yield the events of answers that are written side by side. An error of one of them ends all."""
    found, tasks = asyncio.Queue[tuple[int, Event] | BaseException | None](), list[asyncio.Task[None]]()

    async def run(index: int, events: AsyncGenerator[Event]) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    found.put_nowait((index, event))
        except Exception as error:
            found.put_nowait(error)
        else:
            found.put_nowait(None)

    try:
        tasks += [asyncio.create_task(run(index, events)) for index, events in enumerate(answers)]
        running = len(tasks)
        while running:
            what = await found.get()
            if isinstance(what, BaseException):
                raise what
            running -= what is None
            if what is not None:
                yield what
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def turns_of(events: Events) -> list[Turn]:
    """Return the turns of all answers, in the order of their numbers."""
    async with aclosing(events):
        found = {index: event.turn async for index, event in events if isinstance(event, End)}
    return [found[index] for index in sorted(found)]


class EventStream:
    """A response of server-sent events, as an ASGI application. `started` waits until the answers were accepted."""

    def __init__(self, events: Events, frames: Frames, first: tuple[int, Event]) -> None:
        self._events, self._frames, self._first = events, frames, first

    @classmethod
    async def started(cls, events: Events, frames: Frames) -> EventStream:
        """Return the response. Raises the error of a request that cannot be answered, which then gets its status."""
        return cls(events, frames, await anext(events))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        async with aclosing(self._lines()) as lines:
            async for line in lines:
                body = line.encode("utf-8", "replace")
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lines(self) -> AsyncGenerator[str]:
        """Yield frames, and after each second without one a comment on the progress."""
        progress, said = "writing", time.monotonic()
        pending: asyncio.Task[Any] | None = None
        async with aclosing(self._events) as events:
            try:
                index, event = self._first
                while True:
                    for each in self._frames.of(index, event):
                        yield each
                        said = time.monotonic()
                    progress = _progress(event) or progress
                    pending = asyncio.create_task(anext(events, None))
                    while not pending.done():
                        await asyncio.wait({pending}, timeout=max(0.0, said + EVERY - time.monotonic()))
                        if time.monotonic() - said >= EVERY:
                            yield f": {progress}\n\n"
                            said = time.monotonic()
                    if (found := pending.result()) is None:
                        break
                    index, event = found
                for each in self._frames.end():
                    yield each
            except KvcliError as error:
                for each in self._frames.error(error):
                    yield each
            finally:
                if pending is not None:
                    pending.cancel()
                    await asyncio.gather(pending, return_exceptions=True)


def _progress(event: Event) -> str:
    if isinstance(event, Waiting):
        return f"waiting, {event.ahead:,} ahead"
    if isinstance(event, Read):
        return f"read {event.done:,} of {event.total:,}" if event.done < event.total else "writing"
    return ""
