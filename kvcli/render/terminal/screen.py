"""Output streams of a command, and the user's display options."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Literal, TextIO

from kvcli.environment import Environment
from kvcli.render.terminal.errors import print_note
from kvcli.render.terminal.terminal import Terminal, quoted
from kvcli.safe_output import Styled

# Terminal input during a turn: echo is off, and Ctrl-Z restores the terminal.

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
            signal.signal(kind, before)
            signal.pthread_kill(threading.get_ident(), kind)  # this thread stops here until the process is continued
            signal.signal(kind, stop)

    before = signal.getsignal(kind)
    if before is not signal.SIG_IGN:  # SIG_IGN: a shell without job control
        signal.signal(kind, stop)
    try:
        yield
    finally:
        signal.signal(kind, before)


# Live region: a few lines at the bottom of a terminal that are redrawn in place during a turn.
#
# Rich's `Live` finds its lines by counting upwards from the last one. The count is wrong after a terminal rewraps its
# lines to a narrower window, and lines are torn or lost. Here the cursor is always at the start of the first line,
# which every terminal tracks, so a redraw begins at the cursor and needs no count.

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


StatsMode = Literal["live", "turn", "off"]


@dataclass(slots=True)
class Screen:
    """stdout for the answer, stderr for all other output."""

    out: Terminal
    err: Terminal
    stats: StatsMode = "live"
    quiet: bool = False
    clock: Callable[[], float] = time.monotonic
    stdin: TextIO | None = None  # echo is switched off while a live region is on the screen
    piped: bool = False  # a program reads stdout, and may print to the terminal of stderr
    shared: bool = False  # both streams are the same terminal, so one region can show answer and status row
    verbose: bool = False  # all figures after a turn instead of one line
    markdown: bool = False  # answers are rendered on a terminal
    shows_thinking: bool = False  # thoughts are printed, not folded to a row

    @classmethod
    def of(cls, world: Environment, stats: StatsMode | None = None) -> Screen:
        """Create from the environment's streams, as `--quiet`, `--no-color`, NO_COLOR and TERM require.

        By default, figures are live on a terminal and printed after each turn elsewhere.
        """
        stats = stats or ("live" if world.is_tty("stderr") else "turn")
        out, err = Terminal.of(world, "stdout"), Terminal.of(world, "stderr")
        shared = out.live and err.live and same_device(world.stdout, world.stderr)
        keys = world.stdin if world.is_tty("stdin") else None
        piped = is_pipe(world.stdout)
        options = world.options
        return cls(out, err, stats, options.quiet, world.clock, keys, piped, shared, options.verbose > 0)

    def note(self, text: str) -> None:
        """Print a fact that the user should know, unless `--quiet` is set."""
        if text and not self.quiet:
            print_note(self.err, text)


def same_device(a: TextIO, b: TextIO) -> bool:
    """True if two terminals are one device. Streams without a file, as in tests, are compared by identity."""
    try:
        return os.fstat(a.fileno()).st_rdev == os.fstat(b.fileno()).st_rdev
    except (OSError, ValueError, AttributeError):
        return getattr(a, "stream", a) is getattr(b, "stream", b)


def is_pipe(stream: TextIO) -> bool:
    """True if the output goes to another program, not to a file or a terminal."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
