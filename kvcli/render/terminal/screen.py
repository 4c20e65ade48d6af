"""The two streams a command writes to, and what the user wants to see on them."""

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
    """stdout for the answer, stderr for everything else."""

    out: Terminal
    err: Terminal
    stats: StatsMode = "live"
    quiet: bool = False
    clock: Callable[[], float] = time.monotonic
    stdin: TextIO | None = None  # its echo is switched off while a live region is on the screen
    piped: bool = False  # a program reads stdout, and may write what it reads to the terminal stderr is on
    shared: bool = False  # both streams are the same terminal, so one region can hold answer and row
    verbose: bool = False  # all figures after a turn, not one line

    @classmethod
    def of(cls, world: Environment, stats: StatsMode = "live") -> Screen:
        """The world's streams, as --quiet, --no-color, NO_COLOR and TERM want them."""
        out, err = Terminal.of(world, "stdout"), Terminal.of(world, "stderr")
        shared = out.live and err.live and same_device(world.stdout, world.stderr)
        keys = world.stdin if world.is_tty("stdin") else None
        piped = is_pipe(world.stdout)
        options = world.options
        return cls(out, err, stats, options.quiet, world.clock, keys, piped, shared, options.verbose > 0)

    def note(self, text: str) -> None:
        """Something the user should know, unless nothing beside the answer is wanted."""
        if text and not self.quiet:
            print_note(self.err, text)


def same_device(a: TextIO, b: TextIO) -> bool:
    """Whether two terminals are one. Streams without a file behind them, as in tests, are when they are one object."""
    try:
        return os.fstat(a.fileno()).st_rdev == os.fstat(b.fileno()).st_rdev
    except (OSError, ValueError, AttributeError):
        return getattr(a, "stream", a) is getattr(b, "stream", b)


def is_pipe(stream: TextIO) -> bool:
    """Whether what is written goes to another program, not to a file or a terminal."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
