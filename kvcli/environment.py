"""Environment of a command in one object: streams, variables, folders, clock.

`cli.py` makes the real one; tests make their own. No other file reads `sys` streams or the environment.
"""

from __future__ import annotations

import ctypes
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TextIO, cast

from kvcli.files import sweep
from kvcli.kernels.native import native
from kvcli.safe_output import SafeStream

# Malloc settings that return large freed blocks to the system while weights are loaded or a prompt is prefilled.
#
# glibc raises the size from which blocks get pages of their own to that of the largest one freed, up to 32 MiB. Before
# 2.38 an aligned block, as torch's are, does not fit where one of its size was. After a long prompt a tenth of the
# memory was holes (tests/bench/fit.py). In an answer the same blocks are allocated in every pass, logits of a large
# vocabulary above all, and fresh pages would cost more than the rest of the pass. So blocks are kept there, as by
# default in glibc.

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE = 1 << 20  # bytes, while loading or prefilling
LARGEST = 32 << 20  # glibc's own limit


class LargeBlocks:
    """Large memory blocks of a model, which glibc returns to the system or keeps when they are freed."""

    def __init__(self) -> None:
        self._n_open, self._lock = 0, Lock()

    @contextmanager
    def returned(self) -> Iterator[None]:
        """Return freed blocks to the system while any such context of the model is open."""
        self._count(1)
        try:
            yield
        finally:
            if (functions := native()) is not None:
                functions.release()  # a decoding step's own rows need almost none of this memory
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self._n_open += more
            if self._n_open == max(0, more):  # the first has begun, or the last has ended
                _from(*((LARGE, 128 << 10) if self._n_open else (LARGEST, 2 * LARGEST)))


def _from(large: int, kept: int) -> None:
    """Set the size from which blocks get pages of their own, and the free bytes that the heap keeps at its end."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, large)
        libc.mallopt(M_TRIM_THRESHOLD, kept)
        libc.malloc_trim(0)


Stream = Literal["stdin", "stdout", "stderr"]


@dataclass(slots=True)
class Common:
    """The options every command takes, before or after its name."""

    profile: str | None = None
    set: list[str] = field(default_factory=list)  # KEY=VALUE
    config: Path | None = None
    json: bool = False
    plain: bool = False
    quiet: bool = False
    verbose: int = 0
    log_file: Path | None = None
    no_color: bool = False
    no_input: bool = False
    offline: bool = False


@dataclass(frozen=True, slots=True)
class Paths:
    """Folders of this user; each is created when first written to."""

    config: Path
    data: Path
    state: Path
    cache: Path

    @property
    def chats(self) -> Path:
        return self.data / "chats"

    def sweep(self) -> None:
        """Remove files that killed runs left half written, in these folders and their subfolders."""
        for folder in (self.config, self.data, self.state, self.cache):
            with suppress(OSError):  # the folder does not exist yet
                for each in (folder, *(Path(e) for e in os.scandir(folder) if e.is_dir(follow_symlinks=False))):
                    sweep(each)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Paths:
        """Folders by `KVCLI_HOME` for all; otherwise by the XDG variables, then by the system's convention."""
        kinds = [each.name for each in fields(cls)]
        if home := environ.get("KVCLI_HOME"):
            root = Path(os.path.expanduser(home)).absolute()
            return cls(*(root / kind for kind in kinds))
        import platformdirs

        usual = platformdirs.PlatformDirs("kvcli", appauthor=False)
        xdg = {kind: Path(environ.get(f"XDG_{kind.upper()}_HOME", "")) for kind in kinds}
        its = (p / "kvcli" if p.is_absolute() else getattr(usual, f"user_{kind}_path") for kind, p in xdg.items())
        return cls(*its)


@dataclass(slots=True)
class Environment:
    """Streams, variables and folders of a command. `options` are the common ones, as typed."""

    stdin: TextIO
    stdout: TextIO
    stderr: TextIO
    environ: MutableMapping[str, str]
    cwd: Path
    paths: Paths
    clock: Callable[[], float] = time.perf_counter
    options: Common = field(default_factory=Common)
    file_notes: list[str] = field(default_factory=list)  # on the files read, for the JSON document
    keeps: bool = True  # chats and KV caches may be saved; False if several processes run the command
    is_own_process: bool = False  # the process runs this command alone, so settings of the interpreter may change
    shared: Any = None  # SharedWeights of the resident process that this one was forked from

    def __post_init__(self) -> None:
        """Wrap the output streams, so that all output passes through a SafeStream."""
        self.stdout = cast("TextIO", SafeStream(self.stdout, is_vital=True))
        self.stderr = cast("TextIO", SafeStream(self.stderr, is_vital=False))

    @classmethod
    def real(cls) -> Environment:
        """The environment of this process. Python sets a closed stream to None; it is replaced by an empty one."""
        streams = sys.stdin or nothing("r"), sys.stdout or nothing("w"), sys.stderr or nothing("w")
        try:
            cwd = Path.cwd()
        except FileNotFoundError:  # the folder was removed
            cwd = Path(".")
        return cls(*streams, os.environ, cwd, Paths.of(os.environ))

    def path(self, typed: str | Path) -> Path:
        """Path of a file that the user named, relative to the working folder, with the home folder for `~`."""
        return self.cwd / os.path.expanduser(typed)

    def stream(self, name: Stream) -> TextIO:
        return {"stdin": self.stdin, "stdout": self.stdout, "stderr": self.stderr}[name]

    def is_tty(self, name: Stream) -> bool:
        """True if the stream is a terminal; a closed or missing one is not."""
        try:
            return self.stream(name).isatty()
        except (AttributeError, ValueError):
            return False

    @property
    def may_ask(self) -> bool:
        """True if the user can answer a question."""
        return self.is_tty("stdin") and not self.options.no_input

    def has_color(self, name: Stream) -> bool:
        """True if output is coloured: on a terminal, unless an option or variable disables it, or by FORCE_COLOR."""
        if self.options.no_color or self.options.plain or self.environ.get("NO_COLOR"):
            return False
        if self.environ.get("FORCE_COLOR"):
            return True
        return self.is_tty(name) and self.environ.get("TERM") != "dumb"

    def is_utf8(self, name: Stream) -> bool:
        encoding = getattr(self.stream(name), "encoding", None) or "ascii"
        return encoding.lower().replace("-", "").replace("_", "") == "utf8"

    def width(self, name: Stream = "stdout") -> int:
        """Columns of the stream's terminal. COLUMNS overrides it; 80 without a terminal."""
        columns = self.environ.get("COLUMNS", "")
        if columns.isdecimal() and int(columns) > 0:
            return int(columns)
        try:
            return os.get_terminal_size(self.stream(name).fileno()).columns or 80
        except (AttributeError, OSError, ValueError):
            return shutil.get_terminal_size().columns if self.is_tty(name) else 80

    def read_stdin(self, most: int) -> bytes:
        """Read standard input as bytes, at most `most`."""
        buffer = getattr(self.stdin, "buffer", None)
        return buffer.read(most) if buffer is not None else self.stdin.read(most).encode()


def nothing(mode: str) -> TextIO:
    """A stream that is always empty and discards all output."""
    return io.TextIOWrapper(io.FileIO(os.devnull, mode), encoding="utf-8")
