"""Ctrl-C as a flag that the decoding loop checks between passes, and as an error that libraries cannot suppress."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

IMPATIENT = 1.0  # seconds after the first Ctrl-C in which a second one is ignored


class Interrupt:
    """A handler of Ctrl-C for a block. After the first Ctrl-C, the object, called as `cancel`, returns True.

    A later Ctrl-C does not wait for the end of the pass: it raises KeyboardInterrupt, and the model prefills again. So
    does Ctrl-C while kvcli waits for a worker process, which checks no `cancel`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.since: float | None = None
        self._before: Any = None

    def __call__(self) -> bool:
        return self.since is not None

    def hear(self, _signal: int = signal.SIGINT, frame: FrameType | None = None) -> None:
        """Handle SIGINT."""
        now = self.clock()
        waits = False
        while frame is not None and not waits:
            waits, frame = frame.f_globals.get("__name__") == "kvcli.worker_process", frame.f_back
        if waits or (self.since is not None and now - self.since > IMPATIENT):
            raise KeyboardInterrupt
        self.since = now if self.since is None else self.since

    def __enter__(self) -> Interrupt:
        if _is_ours():
            self._before = signal.signal(signal.SIGINT, self.hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


@contextmanager
def insisting() -> Iterator[None]:
    """Make sure that Ctrl-C ends the block, at its end at the latest.

    This is for loading models: imported libraries have callbacks and bare excepts that lose a KeyboardInterrupt, and
    code that continues after one may raise any other error.
    """
    if not _is_ours():
        yield
        return
    heard: list[int] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    except Exception as error:
        if heard:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


def press_again(lost: sys.UnraisableHookArgs) -> None:
    """Repeat a Ctrl-C that Python dropped in a `__del__` or a callback; for `sys.unraisablehook`."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        with suppress(RuntimeError):  # the program has ended
            threading.Timer(0.05, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(lost)


def _is_ours() -> bool:
    """True in the main thread, unless the shell ignores Ctrl-C, as after `&` or `nohup`."""
    return (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    )
