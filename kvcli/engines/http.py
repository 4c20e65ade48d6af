"""Lines of an inference server's answers: three time-outs, bounded retries, and a cancel that does not wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from itertools import count
from urllib.parse import urlsplit

import httpx2

from kvcli.api import Cancel
from kvcli.errors import EngineUnreachable, UsageError
from kvcli.version import __version__

POLL = 0.1  # seconds between two looks at `cancel`
BUSY = (408, 425, 429, 500, 502, 503, 504)  # answers after which the same request may succeed
LONGEST = 16 << 20  # bytes of a line, at most
LATEST = 60.0  # seconds of Retry-After that are waited for, at most


def never() -> bool:
    """Cancel nothing."""
    return False


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, response: httpx2.Response) -> None:
        super().__init__(response.status_code)
        self.status, self.body, after = response.status_code, response.text, response.headers.get("retry-after", "")
        self.after = float(after) if after.isascii() and after.isdecimal() else None  # seconds


@dataclass(frozen=True)
class Server:
    """An inference server, and how long to wait for it."""

    url: str  # http(s)://HOST[:PORT][/PATH]
    key: str = field(default="", repr=False)  # bearer token
    connect: float = 10.0  # seconds
    first_byte: float = 600.0  # seconds to the first line, before which a server prefills the prompt
    silence: float = 60.0  # seconds between two lines
    tries: int = 4  # of a request that fails before its first line

    def __post_init__(self) -> None:
        try:
            parts, _ = urlsplit(self.url), httpx2.URL(self.url)  # each refuses what the other takes
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except (ValueError, httpx2.InvalidURL):
            is_usable = False
        if not is_usable or not self.url.isprintable() or set("@?# ") & set(self.url):
            what = f"{self.url!r} is not http:// or https:// with a host, and without user name and query"
            raise UsageError(what, try_=["http://127.0.0.1:8000/v1, as the server prints it"])

    def lines(self, path: str, body: object = None, cancel: Cancel = never) -> Generator[str]:
        """Yield the lines of the answer to a POST of `body` as JSON, or to a GET. Ends early if `cancel()` is True.

        Only a request without a line of an answer is repeated. Raises Refused, and EngineUnreachable.
        """
        with asyncio.Runner() as runner:
            for attempt in count(1):
                lines, seconds, wait = self._once(path, body), self.first_byte, min(0.25 * 2**attempt, LATEST)
                has_begun = False
                try:
                    while not cancel() and (line := runner.run(_next(lines, seconds, cancel))) is not None:
                        seconds, has_begun = self.silence, True
                        yield line
                    return
                except Refused as error:
                    wait = wait if error.after is None else error.after
                    if attempt == self.tries or error.status not in BUSY or wait > LATEST:
                        raise
                except (httpx2.RequestError, TimeoutError) as error:
                    if has_begun or attempt == self.tries or isinstance(error, TimeoutError | httpx2.DecodingError):
                        raise self._lost(error, seconds, has_begun) from None
                finally:
                    runner.run(lines.aclose())
                until = time.monotonic() + wait
                while time.monotonic() < until:
                    if cancel():
                        return
                    time.sleep(POLL)

    async def _once(self, path: str, body: object) -> AsyncGenerator[str]:
        headers = {"User-Agent": f"kvcli/{__version__}"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        wait = httpx2.Timeout(None, connect=self.connect)
        # no variable sends the prompt to a proxy (trust_env), and no redirect the key to another server
        async with (
            httpx2.AsyncClient(headers=headers, timeout=wait, trust_env=False) as client,
            client.stream("GET" if body is None else "POST", self.url.rstrip("/") + path, json=body) as response,
        ):
            if response.status_code != 200:
                await response.aread()
                raise Refused(response)
            rest = b""
            async for data in response.aiter_bytes():
                *lines, rest = (rest + data).split(b"\n")  # not splitlines: text in JSON may have other line ends
                for line in lines:
                    yield line.decode(errors="replace").rstrip("\r")
                if len(rest) > LONGEST:
                    raise httpx2.RemoteProtocolError(f"a line has more than {LONGEST:,} bytes")
            yield rest.decode(errors="replace")

    def _lost(self, error: Exception, seconds: float, has_begun: bool) -> EngineUnreachable:
        if isinstance(error, TimeoutError):
            ways = ["--engine-timeout SECONDS, for a server that is slow or busy", "look at the server's log"]
            return EngineUnreachable(f"{self.url} sent nothing for {seconds:g} s", code="engine_silent", try_=ways)
        ways = ["start the server, or wait until it has its model", "--base-url with the address that it prints"]
        what = f"{self.url} was lost during its answer" if has_begun else f"no answer from {self.url}"
        code = "engine_lost" if has_begun else "engine_unreachable"
        return EngineUnreachable(f"{what}: {str(error) or type(error).__name__}", code=code, try_=ways)


async def _next(lines: AsyncGenerator[str], seconds: float, cancel: Cancel) -> str | None:
    """Return the next line; None at the end, or after a cancel. Raises TimeoutError."""
    task, until = asyncio.ensure_future(anext(lines, None)), time.monotonic() + seconds
    while not (await asyncio.wait([task], timeout=POLL))[0]:
        if (is_over := cancel()) or time.monotonic() > until:
            task.cancel()
            await asyncio.wait([task])
            if is_over:
                return None
            raise TimeoutError
    return task.result()
