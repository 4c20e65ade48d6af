"""A process of its own for what strangers wrote: bounded, shut in (sandbox.py), told what to do in lines of JSON.

The parent parses nothing but the answer. It kills the process when that takes too long or writes too much; a process
whose parent is gone is killed by the kernel, or ends at its own clock.
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

# Where to import from is told by the parent: the child must run the same kvcli and the same parsers, and must not look
# into the folder it was started in. Without the site module it starts sooner.
BOOT = (
    "import json, sys; sys.path[:], module, *told = json.loads(sys.argv[1]); "
    "from importlib import import_module; sys.exit(import_module(module).main(*told))"
)
CHUNK = 1 << 16
START = 30.0  # seconds for a process to start and shut itself in
READY = b"null"  # a line that asks whether it is


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of such a process."""

    memory: int = 1 << 30  # bytes of address space
    cpu: int = 40  # seconds
    wall: float = 120.0  # seconds
    output: int = 1 << 28  # bytes of JSON


class TooSlow(Exception):
    """It was not done in time."""


class TooLong(Exception):
    """It wrote more than agreed."""


class WorkerProcess:
    """A running `main(parent, limits, file)` of a module, which imports, shuts itself in and then reads its input.

    The kernel takes the thread that started it for its parent, and ends it with that thread.
    """

    def __init__(self, module: str, limits: Limits, file: int | None = None) -> None:
        """`file` is an open descriptor that it may read."""
        self.limits = limits
        told = json.dumps([_path(), module, os.getpid(), asdict(limits), file])
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BOOT, told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[] if file is None else [file],
            start_new_session=True,  # a group to kill, and Ctrl-C stays with the parent
            env=_environment(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        self._kill = weakref.finalize(self, _kill, self._process)  # also when nobody holds it any more, and at exit

    def ask(self, line: bytes, seconds: float, output: int | None = None) -> Iterator[bytes]:
        """Tell it a line; whole lines of its answer, of `output` bytes, until it ends. Raises TooSlow, TooLong."""
        deadline, held, seen = time.monotonic() + seconds, list[bytes](), 0
        most = self.limits.output if output is None else output
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            # what does not read what it is told must not hold its parent up
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
        """What remains to be told."""
        try:
            return rest[os.write(self._in.fileno(), rest[:CHUNK]) :]
        except BrokenPipeError:  # a process that died says so by the end of its answer
            return None

    def end(self) -> int:
        """Make sure that it is gone; its status."""
        self._kill()
        return self._process.returncode


class Standby:
    """Such a process kept for many questions, one at a time, and started anew where it ended or is too small."""

    def __init__(
        self, start: Callable[[int], WorkerProcess], room: int, seconds: float, failed: Callable[[str, str], Exception]
    ) -> None:
        """`start`: one for questions of so many bytes, at first `room`; ready after so many seconds.

        `failed`: what to raise where it was too "heavy", is "broken" or has "ended", and why.
        """
        self._start, self._room, self._seconds, self._failed = start, room, seconds, failed
        self._process: WorkerProcess | None = None
        self._lock = Lock()

    def start(self) -> None:
        """Get it ready, which takes a moment; nobody needs to wait for it."""
        self._process = self._start(self._room)

    def ask(self, asked: object, terms: Callable[[int], tuple[float, int]]) -> dict[str, Any]:
        """The JSON object that answers. `terms`: of a question of so many bytes, seconds and bytes for its answer."""
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
            found = {"broken": "it answered nonsense"}
        for how in {"heavy", "broken", "ended"} & {*found}:
            busy = "" if how == "broken" else "; it may be broken, or made to keep this machine busy"
            raise self._failed(how, f"{found[how]}{busy}")
        return found

    def _answer(self, line: bytes, seconds: float, output: int) -> bytes | None:
        """The line that answers; None where it ended instead. After TooSlow or TooLong it is gone, as after Ctrl-C."""
        with self._lock:
            if len(line) > self._room:
                self._process, self._room = None, 2 * len(line)
            process, self._process = self._process, None  # back only after a whole answer
            answer = None
            try:
                # one that was killed while it waited is replaced: no question did that
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
    """How this system shuts such a process in; nothing where none can be started."""
    process = WorkerProcess("kvcli.sandbox", Limits())
    try:
        return [str(word) for line in process.ask(b"", START) for word in json.loads(line)]
    except (TooSlow, TooLong, ValueError):
        return []
    finally:
        process.end()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:  # afterwards its number may be another's
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            with suppress(BrokenPipeError):
                stream.close()


def _path() -> list[str]:
    """Where this process imports from, without the folder it happens to be in."""
    root = str(Path(__file__).resolve().parents[1])
    return [root, *(entry for entry in sys.path if entry and entry != root)]


def _environment() -> dict[str, str]:
    """No secrets; only where the shared library of Python lies, on machines where that must be told."""
    return {name: value for name, value in os.environ.items() if name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")}
