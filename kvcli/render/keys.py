"""Keep what is typed while a turn runs off the screen; it stays in the queue for the next prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

try:
    import termios
except ImportError:  # Windows has no echo to switch off here
    termios = None  # type: ignore[assignment]


@contextmanager
def echo(stdin: TextIO | None, on: bool) -> Iterator[None]:
    """Echo on or off inside the block. Nothing happens where stdin is no terminal."""
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
