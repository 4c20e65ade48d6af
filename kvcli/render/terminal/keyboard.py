"""Terminal input during a turn: echo is off, and Ctrl-Z restores the terminal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO

from kvcli.render.terminal.live_region import LiveRegion

try:
    import termios
except ImportError:  # Windows has no echo to switch off here
    termios = None  # type: ignore[assignment]


@contextmanager
def echo(stdin: TextIO | None, on: bool) -> Iterator[None]:
    """Switch echo on or off inside the block. Text typed without echo stays in the queue for the next prompt."""
    saved = None
    if stdin is not None and termios is not None:
        try:
            saved = termios.tcgetattr(stdin.fileno())
            wanted = [*saved]
            wanted[3] = saved[3] | termios.ECHO if on else saved[3] & ~(termios.ECHO | termios.ECHONL)
            termios.tcsetattr(stdin.fileno(), termios.TCSANOW, wanted)
        except (OSError, ValueError, termios.error):
            saved = None
    try:
        yield
    finally:
        if saved is not None and stdin is not None:
            termios.tcsetattr(stdin.fileno(), termios.TCSANOW, saved)


def forget_typed(stdin: TextIO) -> None:
    """Discard text that was typed before a question, because it is no answer to it."""
    if termios is not None:
        with suppress(OSError, ValueError, AttributeError, termios.error):
            termios.tcflush(stdin.fileno(), termios.TCIFLUSH)


@contextmanager
def suspendable(region: LiveRegion | None, stdin: TextIO | None) -> Iterator[None]:
    """Remove the region on Ctrl-Z inside the block and stop the process; redraw the region when it continues."""
    kind = getattr(signal, "SIGTSTP", None)
    if region is None or kind is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        with region.lock, echo(stdin, on=True):  # the timer must not draw meanwhile
            region.close()
            signal.signal(kind, signal.SIG_DFL)
            signal.pthread_kill(threading.get_ident(), kind)  # this thread stops here until the process is continued
            signal.signal(kind, stop)

    before = signal.getsignal(kind)
    if before is not signal.SIG_IGN:  # SIG_IGN: a shell without job control
        signal.signal(kind, stop)
    try:
        yield
    finally:
        signal.signal(kind, before)
