"""Worker process for untrusted input: limited, sandboxed (sandbox.py), with requests as lines of JSON.

The parent parses nothing but the answer. It kills the process if the answer takes too long or is too large. If the
parent ends, the kernel kills the process, or the process ends by its own timer.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

# The parent passes the import path: the child must run the same kvcli and the same parsers, and must not import from
# its working folder. Without the site module it starts sooner.
BOOT = (
    "import json, sys; sys.path[:], module, *told = json.loads(sys.argv[1]); "
    "from importlib import import_module; sys.exit(import_module(module).main(*told))"
)
CHUNK = 1 << 16
START = 30.0  # seconds for a process to start and enter the sandbox
READY = b"null"  # a line that tests if the process is ready


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a worker process."""

    memory: int = 1 << 30  # bytes of address space
    cpu: int = 40  # seconds
    wall: float = 120.0  # seconds
    output: int = 1 << 28  # bytes of JSON


class TooSlow(Exception):
    """Error of a worker that did not finish in time."""


class TooLong(Exception):
    """Error of a worker that wrote more than allowed."""


class WorkerProcess:
    """A running `main(parent, limits, file)` of a module, which imports, enters the sandbox and then reads its input.

    The kernel treats the thread that started it as its parent, and ends it with that thread.
    """

    def __init__(self, module: str, limits: Limits, file: int | None = None) -> None:
        """`file` is an open descriptor that the process may read."""
        self.limits = limits
        told = json.dumps([_path(), module, os.getpid(), asdict(limits), file])
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BOOT, told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[] if file is None else [file],
            start_new_session=True,  # a group to kill, and Ctrl-C reaches only the parent
            env=_environment(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        self._kill = weakref.finalize(self, _kill, self._process)  # also when unreferenced, and at exit

    def ask(self, line: bytes, seconds: float, output: int | None = None) -> Iterator[bytes]:
        """Send a line; yield whole lines of the answer, of at most `output` bytes in all. Raises TooSlow, TooLong."""
        deadline, held, seen = time.monotonic() + seconds, list[bytes](), 0
        most = self.limits.output if output is None else output
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            # a process that does not read its input must not block the parent
            selector.register(self._in, selectors.EVENT_WRITE, memoryview(line + b"\n"))
            while True:
                ready = {key.fileobj: key.data for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
                if time.monotonic() >= deadline:
                    raise TooSlow
                if rest := ready.get(self._in):
                    if rest := self._tell(rest):
                        selector.modify(self._in, selectors.EVENT_WRITE, rest)
                    else:
                        selector.unregister(self._in)
                if self._out not in ready:
                    continue
                data = os.read(self._out.fileno(), CHUNK)
                seen += len(data)
                if not data:
                    return
                if seen > most:
                    raise TooLong
                held.append(data)
                if b"\n" in data:
                    *lines, last = b"".join(held).split(b"\n")
                    held = [last]
                    yield from lines

    def _tell(self, rest: memoryview) -> memoryview | None:
        """Write to the process; return the bytes that remain."""
        try:
            return rest[os.write(self._in.fileno(), rest[:CHUNK]) :]
        except BrokenPipeError:  # the end of its answer shows that the process died
            return None

    def end(self) -> int:
        """End the process if it still runs; return its status."""
        self._kill()
        return self._process.returncode


class Standby:
    """A worker process kept for many requests, one at a time, and restarted if it ended or is too small."""

    def __init__(
        self, start: Callable[[int], WorkerProcess], room: int, seconds: float, failed: Callable[[str, str], Exception]
    ) -> None:
        """`start`: makes a process for requests of at most this many bytes, at first `room`; ready within `seconds`.

        `failed`: makes the error from "heavy", "broken" or "ended", and the reason.
        """
        self._start, self._room, self._seconds, self._failed = start, room, seconds, failed
        self._process: WorkerProcess | None = None
        self._lock = Lock()

    def start(self) -> None:
        """Start the process in advance, without waiting for it."""
        self._process = self._start(self._room)

    def stop(self) -> None:
        """End the process, before this one is forked. The next request starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def ask(self, asked: object, terms: Callable[[int], tuple[float, int]]) -> dict[str, Any]:
        """Return the JSON object of the answer. `terms`: bytes of a request -> seconds and bytes for its answer."""
        line = json.dumps(asked, ensure_ascii=False).encode("utf-8", "surrogatepass")
        seconds, output = terms(len(line))
        found: dict[str, Any] = {"ended": "it takes too much memory, or ended its process"}
        try:
            if (answer := self._answer(line, seconds, output)) is not None:
                found = dict(json.loads(answer).items())
        except TooSlow:
            found = {"heavy": f"it was not done after {seconds:.0f} seconds"}
        except TooLong:
            found = {"heavy": "it writes without end"}
        except (ValueError, AttributeError, RecursionError):
            found = {"broken": "it returned an invalid answer"}
        for how in {"heavy", "broken", "ended"} & {*found}:
            busy = "" if how == "broken" else "; it may be broken, or made to keep this machine busy"
            raise self._failed(how, f"{found[how]}{busy}")
        return found

    def _answer(self, line: bytes, seconds: float, output: int) -> bytes | None:
        """Return the answer line; None if the process ended. After TooSlow, TooLong or Ctrl-C the process is gone."""
        with self._lock:
            if len(line) > self._room:
                self._process, self._room = None, 2 * len(line)
            process, self._process = self._process, None  # put back only after a whole answer
            answer = None
            try:
                # a process that was killed while idle is replaced, because no request caused that
                if process is None or next(process.ask(READY, self._seconds), None) is None:
                    process = self._start(self._room)
                    next(process.ask(READY, self._seconds), None)
                answer = next(process.ask(line, seconds, output), None)
            finally:
                if answer is None and process is not None:
                    process.end()
            self._process = process if answer is not None else None
            return answer


def means() -> list[str]:
    """Means by which this system sandboxes such a process; empty if none can be started."""
    process = WorkerProcess("kvcli.sandbox", Limits())
    try:
        return [str(word) for line in process.ask(b"", START) for word in json.loads(line)]
    except (TooSlow, TooLong, ValueError):
        return []
    finally:
        process.end()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:  # afterwards its number may be another process's
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            with suppress(BrokenPipeError):
                stream.close()


def _path() -> list[str]:
    """Import path of this process, without the current folder."""
    root = str(Path(__file__).resolve().parents[1])
    return [root, *(entry for entry in sys.path if entry and entry != root)]


def _environment() -> dict[str, str]:
    """Environment without secrets: the path of Python's shared library, where one is needed, and numpy's threads."""
    found = {name: value for name, value in os.environ.items() if name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")}
    return {**found, "OPENBLAS_NUM_THREADS": "1"}  # one for each core would reserve more memory than a worker has
