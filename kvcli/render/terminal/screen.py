"""Output streams of a command, and the user's display options."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TextIO

from kvcli.environment import Environment
from kvcli.render.terminal.errors import print_note
from kvcli.render.terminal.terminal import Terminal

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

    @classmethod
    def of(cls, world: Environment, stats: StatsMode = "live") -> Screen:
        """Create from the environment's streams, as `--quiet`, `--no-color`, NO_COLOR and TERM require."""
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
