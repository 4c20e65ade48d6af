"""The few rows at the bottom of a terminal that are redrawn in place while a turn runs.

Rich's `Live` finds its rows by counting upwards from the last one. A terminal that rewraps its lines when the window
is narrowed makes that count wrong, and lines are torn or eaten. Here the cursor waits at the start of the first row,
which every terminal keeps track of, so a redraw begins where the cursor is and needs no count.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvcli.render.terminal.terminal import Terminal, quoted
from kvcli.safe_output import Styled

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
WRAP, NO_WRAP = "\x1b[?7h", "\x1b[?7l"
TO_LINE_END, TO_SCREEN_END = "\x1b[K", "\x1b[J"
# This line and all below it. Not TO_SCREEN_END alone: from the top left corner, tmux takes that for clearing the
# screen and moves what was there to its history.
EMPTY = "\x1b[2K\x1b7\x1b[B" + TO_SCREEN_END + "\x1b8"


class LiveRegion:
    """Rows that stay below everything written through `draw`. Each row must be narrower than the terminal."""

    def __init__(self, terminal: Terminal, *also: Terminal) -> None:
        """`also` are other streams to the same terminal, whose lines must not land among the rows."""
        self.terminal = terminal
        self.streams = (terminal, *also)
        self.rows: list[Styled] = []
        self.width = 0  # at the last draw
        self.is_open = False
        self.is_over = False
        self.lock = threading.RLock()  # a timer draws the rows while the main thread writes a note

    def draw(self, above: Sequence[str], rows: Sequence[str]) -> None:
        """Write finished lines for good, then the rows below them. Nothing is sent when nothing changed."""
        with self.lock:
            if not self.is_over:
                self._draw(above, rows)

    def _draw(self, above: Sequence[str], rows: Sequence[str]) -> None:
        lines, ready = list(map(_ready, above)), list(map(_ready, rows))
        width = self.terminal.width
        if not lines and ready == self.rows and width == self.width:
            return
        up = f"\x1b[{len(ready) - 1}A" if len(ready) > 1 else ""
        # a terminal that rewrapped the rows remembers them as joined until the lines are emptied
        start = ("" if self.is_open else HIDE) + ("" if width == self.width else "\r" + EMPTY)
        # each line is erased behind its end, not before it, so that nothing flickers
        body = "".join(line + TO_LINE_END + "\n" for line in lines)
        if ready:
            # the window may be narrowed while these bytes are on their way: rows that wrapped would not be found again
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
        """Remove the rows, after writing what is left for good; the cursor is back where text goes."""
        with self.lock:
            if self.is_open or above:
                self._draw(above, [])
                self.terminal.write(Styled(SHOW))
            for stream in self.streams:
                stream.above = None
            self.rows, self.is_open = [], False

    def end(self) -> None:
        """Remove the rows for good: a timer that comes late draws nothing."""
        with self.lock:
            self.close()
            self.is_over = True


def _ready(line: str) -> Styled:
    return line if isinstance(line, Styled) else quoted(line)
