"""The gate of the server: who may ask, how much and how slowly; and the end of work when a client leaves.

A server on a loopback address is open to every page in the user's browser, so requests of pages are refused by Host,
Origin and Sec-Fetch-Site, and by their content type, which a page cannot set without a preflight request.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvcli.errors import Busy, KvcliError
from kvcli.safe_output import neutralise
from kvcli.serve.errors import Refused, error_response

BODY = 16 << 20  # bytes
BODIES = 256 << 20  # bytes of all requests that are not answered yet
HEAD = 64 << 10  # bytes
PATIENCE = 10.0  # seconds for a head, and for a body
STALL = 60.0  # seconds in which a client has to read something of a response
CONNECTIONS = 2000
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?")
OPEN = ("/", "/page.css", "/page.js", "/health")  # paths that need no key

log = logging.getLogger("kvcli.serve")


def host_of(header: str) -> str:
    """Return the name in a Host header, NAME, NAME:PORT or [IPv6]:PORT; "" for anything else."""
    found = _HOST.fullmatch(header.lower())
    return (found[1] or found[2]).rstrip(".") if found else ""


def is_loopback(name: str) -> bool:
    """True for localhost and for loopback addresses."""
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass
class Gate:
    """An ASGI application around the server's own: refuses requests, reads their body, and cancels their work."""

    app: ASGIApp
    bug: Callable[[Exception], KvcliError]  # reports an unforeseen error, and returns what the client is told
    count: Callable[[str, int, float], None] = lambda route, status, seconds: None
    hosts: Collection[str] = ()  # names beside loopback ones that a Host header may have
    origins: Collection[str] = ()  # origins of web pages that may ask
    key: bytes | None = field(default=None, repr=False)
    patience: float = PATIENCE
    held: int = 0  # bytes of the bodies of requests that are not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, began, body = 0, time.monotonic(), bytearray()
        head = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        scope["app"] = self.app  # the router raises its 404 and 405 then

        async def checked_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-content-type-options", b"nosniff")]
            await send(message)

        try:
            try:
                self._check(scope, head)
                await self._read(receive, body)
                await self._answer(scope, receive, checked_send, body)
            except HTTPException as error:  # of the router
                code, said = _OF_ROUTER[error.status_code]
                raise Refused(error.status_code, said, code=code, headers=error.headers or {}) from None
        except ClientGone:
            status = 499
        except Exception as error:
            if status:  # the connection is closed: what was sent stays incomplete
                raise
            known = error if isinstance(error, KvcliError) else self.bug(error)
            await error_response(known)(scope, receive, checked_send)
        finally:
            self.held -= len(body)
            seconds = time.monotonic() - began
            route = getattr(scope.get("route"), "path", "other")
            self.count(route, status, seconds)
            path = neutralise(scope["path"], one_line=True)
            log.info("%s %s %d %.3f s", neutralise(scope["method"], one_line=True), path, status, seconds)

    def _check(self, scope: Scope, head: dict[str, str]) -> None:
        """Raise Refused for a request that may not be served."""
        # uvicorn limits only heads that come in parts
        if sum(len(name) + len(value) for name, value in head.items()) > HEAD:
            raise Refused(431, f"the head of a request has at most {HEAD >> 10} KiB", code="head_too_large")
        host, origin = head.get("host", "").lower(), head.get("origin", "").lower()
        if not ((name := host_of(host)) and (is_loopback(name) or name in self.hosts)):
            raise Refused(403, "this host name is not served", code="bad_host", try_=["kvcli serve --allow-host NAME"])
        site, own = head.get("sec-fetch-site", "none"), ("", f"{scope['scheme']}://{host}")
        is_own = origin in own and site in ("none", "same-origin")
        if not is_own and origin not in self.origins:
            ways = ["kvcli serve --allow-origin ORIGIN"]
            raise Refused(403, "web pages of other sites may not ask", code="bad_origin", try_=ways)
        if self.key is not None and scope["path"] not in OPEN:
            given = re.sub("^bearer ", "", head.get("authorization", ""), flags=re.I).strip()
            given = given or head.get("x-api-key", "")
            if not hmac.compare_digest(given.encode("latin-1"), self.key):
                challenge = {"WWW-Authenticate": "Bearer"}
                raise Refused(401, "a key is needed", code="invalid_api_key", headers=challenge, try_=[_KEY])
        kind = head.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            ways = ["Content-Type: application/json"]
            raise Refused(415, "a request has JSON", code="bad_content_type", try_=ways)
        length = head.get("content-length", "0")
        if not length.isdecimal() or int(length) > BODY:
            raise _too_large()

    async def _read(self, receive: Receive, body: bytearray) -> None:
        """Read the body of a request."""
        is_more = True
        try:
            async with asyncio.timeout(self.patience):
                while is_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += (more := message.get("body", b""))
                    self.held += len(more)
                    is_more = message.get("more_body", False)
                    if len(body) > BODY:
                        raise _too_large()
                    if self.held > BODIES:
                        raise Busy(f"requests of {BODIES >> 20} MiB are not answered yet", retry_after=1.0)
        except TimeoutError:
            raise Refused(408, f"the request was not complete after {self.patience:.0f} s", code="too_slow") from None

    async def _answer(self, scope: Scope, receive: Receive, send: Send, body: bytearray) -> None:
        """Run the application, and cancel it as soon as the client leaves, whatever it does then."""
        is_read = False

        async def read() -> Message:
            nonlocal is_read
            if is_read:
                await asyncio.shield(gone)
                return {"type": "http.disconnect"}
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work, gone = asyncio.ensure_future(self.app(scope, read, send)), asyncio.ensure_future(leave())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


_OF_ROUTER = {404: ("not_found", "there is no such path"), 405: ("wrong_method", "this path has another method")}
_KEY = "Authorization: Bearer KEY"


class ClientGone(Exception):
    """The client closed the connection before its response was complete."""


def _too_large() -> Refused:
    return Refused(413, f"a request has at most {BODY >> 20} MiB", code="body_too_large")


class PatientProtocol(H11Protocol):
    """A connection with limits that uvicorn does not set: a time for each head, a time in which a client reads
    something, and a number of connections."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.abort()
        self._after(PATIENCE, self._end)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._after(PATIENCE, self._end)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._after(STALL, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._after(PATIENCE, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do this after a time, in place of what was to be done before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, act)

    def _end(self) -> None:
        """Close the connection, if no request runs. `close` alone waits for a client that does not read."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
            self._after(STALL, self.transport.abort)
