"""Server-sent events of an answer, and answers returned as a whole. Protocols differ in their frames only."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from typing import Any, Protocol

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvcli.api import End, Event, Read, Turn, Waiting
from kvcli.errors import KvcliError

EVERY = 1.0  # seconds without a frame until a comment is sent: proxies close silent connections
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
HEADERS += [(b"x-accel-buffering", b"no")]  # nginx would hold the frames back

Events = AsyncGenerator[tuple[int, Event | None]]  # number of the answer, event; None: `EVERY` seconds have passed


class Form(Protocol):
    """The form of one response in a protocol, streamed or whole."""

    def of(self, index: int, event: Event) -> Iterable[str]:
        """Return the frames of an event of an answer; most events but text, thoughts, calls and `End` have none."""

    def error(self, error: KvcliError) -> str:
        """Return the frame of an error, after which nothing follows."""

    def whole(self, turns: list[Turn]) -> dict[str, Any]:
        """Return the response with finished answers."""


def frame(data: object, name: str = "") -> str:
    """Return a frame with JSON data. `name`: of the event, in protocols that have names."""
    named = f"event: {name}\n" if name else ""
    return f"{named}data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def several(answers: Iterable[AsyncGenerator[Event]]) -> Events:
    """Yield the events of answers that are written side by side. An error of one of them ends all."""
    found = asyncio.Queue[tuple[int, Event] | Exception | None]()

    async def run(index: int, events: AsyncGenerator[Event]) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    found.put_nowait((index, event))
        except Exception as error:
            found.put_nowait(error)
        else:
            found.put_nowait(None)

    tasks = [asyncio.create_task(run(index, events)) for index, events in enumerate(answers)]
    running = len(tasks)
    try:
        while running:
            what: tuple[int, Event | None] | Exception | None = (0, None)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    what = await found.get()
            if isinstance(what, Exception):
                raise what
            running -= what is None
            if what is not None:
                yield what
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def response_of(answers: Iterable[AsyncGenerator[Event]], form: Form, *, stream: bool) -> ASGIApp:
    """Return the response with all answers; a stream after the first event, so that a refusal gets its status."""
    events = several(answers)
    if not stream:
        async with aclosing(events):
            found = {index: event.turn async for index, event in events if isinstance(event, End)}
        return JSONResponse(form.whole([found[index] for index in sorted(found)]))
    while (first := await anext(events))[1] is None:
        pass

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        async with aclosing(_lines(first, events, form)) as lines:
            async for line in lines:
                body = line.encode("utf-8", "replace")
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return respond


async def _lines(first: tuple[int, Event | None], events: Events, form: Form) -> AsyncGenerator[str]:
    """Yield frames, and after each second without one a comment on the progress."""
    progress, said, (index, event) = "writing", time.monotonic(), first
    async with aclosing(events):
        try:
            while True:
                progress = _progress(event) or progress
                for each in form.of(index, event) if event is not None else ():
                    yield each
                    said = time.monotonic()
                if time.monotonic() - said >= EVERY:
                    yield f": {progress}\n\n"
                    said = time.monotonic()
                index, event = await anext(events)
        except StopAsyncIteration:
            return
        except KvcliError as error:
            yield form.error(error)


def _progress(event: Event | None) -> str:
    if isinstance(event, Waiting):
        return f"waiting, {event.ahead:,} ahead"
    if isinstance(event, Read):
        return f"read {event.done:,} of {event.total:,}" if event.done < event.total else "writing"
    return ""
