"""Live region: a few lines at the bottom of a terminal that are redrawn in place during a turn.

Rich's `Live` finds its lines by counting upwards from the last one. The count is wrong after a terminal rewraps its
lines to a narrower window, and lines are torn or lost. Here the cursor is always at the start of the first line, which
every terminal tracks, so a redraw begins at the cursor and needs no count.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvcli.render.terminal.terminal import Terminal, quoted
from kvcli.safe_output import Styled

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
WRAP, NO_WRAP = "\x1b[?7h", "\x1b[?7l"
TO_LINE_END, TO_SCREEN_END = "\x1b[K", "\x1b[J"
# Erase this line and all below it. TO_SCREEN_END alone is not used: from the top left corner, tmux treats it as
# clearing the screen and moves the content to its history.
EMPTY = "\x1b[2K\x1b7\x1b[B" + TO_SCREEN_END + "\x1b8"


class LiveRegion:
    """Lines below everything written through `draw`. Each line must be narrower than the terminal."""

    def __init__(self, terminal: Terminal, *also: Terminal) -> None:
        """`also` are other streams to the same terminal, whose lines must be printed above the region."""
        self.terminal = terminal
        self.streams = (terminal, *also)
        self.rows: list[Styled] = []
        self.width = 0  # at the last draw
        self.is_open = False
        self.is_over = False
        self.lock = threading.RLock()  # a timer draws while the main thread writes a note

    def draw(self, above: Sequence[str], rows: Sequence[str]) -> None:
        """Print finished lines permanently, then the region below them. Nothing is sent if nothing changed."""
        with self.lock:
            if not self.is_over:
                self._draw(above, rows)

    def _draw(self, above: Sequence[str], rows: Sequence[str]) -> None:
        lines, ready = list(map(_ready, above)), list(map(_ready, rows))
        width = self.terminal.width
        if not lines and ready == self.rows and width == self.width:
            return
        up = f"\x1b[{len(ready) - 1}A" if len(ready) > 1 else ""
        # a terminal that rewrapped the lines treats them as joined until they are erased
        start = ("" if self.is_open else HIDE) + ("" if width == self.width else "\r" + EMPTY)
        # each line is erased after its end, not before it, to avoid flicker
        body = "".join(line + TO_LINE_END + "\n" for line in lines)
        if ready:
            # the window may become narrower before these bytes arrive; wrapped lines could not be found again
            body += NO_WRAP + (TO_LINE_END + "\n").join(ready) + WRAP + TO_SCREEN_END
        else:
            body += EMPTY
        self.rows, self.width, self.is_open = ready, width, True
        for stream in self.streams:
            stream.above = self._insert
        self.terminal.write(Styled(f"{start}\r{body}{up}\r"))

    def _insert(self, line: Styled) -> None:
        with self.lock:
            self._draw([line], self.rows)

    def close(self, above: Sequence[str] = ()) -> None:
        """Remove the region after printing `above`; the cursor returns to the text position."""
        with self.lock:
            if self.is_open or above:
                self._draw(above, [])
                self.terminal.write(Styled(SHOW))
            for stream in self.streams:
                stream.above = None
            self.rows, self.is_open = [], False

    def end(self) -> None:
        """Remove the region permanently: a late timer draws nothing."""
        with self.lock:
            self.close()
            self.is_over = True


def _ready(line: str) -> Styled:
    return line if isinstance(line, Styled) else quoted(line)
