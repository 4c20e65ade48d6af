"""Ends of a command: Ctrl-C, logs, errors and exit codes."""

from __future__ import annotations

import _thread
import errno
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import typer

from kvcli.commands.common.output import print_json
from kvcli.environment import Environment
from kvcli.errors import BadInput, DoesNotFit, ExitStatus, KvcliError, UsageError, is_out_of_memory, writing
from kvcli.files import append, private_folder
from kvcli.render.terminal.terminal import Terminal
from kvcli.settings.renamed import FORMER
from kvcli.version import __version__

# Ctrl-C as a flag that the decoding loop checks between passes, and as an error that libraries cannot suppress.

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
    signals: list[int] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    except Exception as error:
        if signals:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if signals:
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


# Logging: to stderr with -v, to a file with --log-file, and to the user's log after an internal error.

LARGEST = 1 << 20  # bytes; beyond that the older half is deleted
FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def start_log(world: Environment) -> None:
    """Set up the logger `kvcli` from the options. Prompts and answers are never logged."""
    logger, options = logging.getLogger("kvcli"), world.options
    kept = [h for h in logger.handlers if options.log_file and getattr(h, "path", None) == options.log_file]
    for handler in [h for h in logger.handlers if h not in kept]:
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    logger.setLevel(logging.DEBUG)
    if options.verbose:
        handler = logging.StreamHandler(world.stderr)
        handler.setLevel(logging.INFO if options.verbose == 1 else logging.DEBUG)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
    if options.log_file and not kept:
        with writing(f"the log {options.log_file}"):
            to_file = LogFile(options.log_file, world)
        to_file.setFormatter(logging.Formatter(FORM))
        logger.addHandler(to_file)
        logger.info("kvcli %s", __version__)


class LogFile(logging.FileHandler):
    """The file of --log-file. A failed write is reported once, and the command continues."""

    def __init__(self, path: Path, world: Environment) -> None:
        super().__init__(path, encoding="utf-8")
        self.path, self.world, self.is_told = path, world, False

    def close(self) -> None:
        with suppress(OSError):  # already reported
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.is_told:
            from kvcli.render.terminal.errors import print_warning

            self.is_told, err = True, Terminal.of(self.world, "stderr")
            print_warning(err, f"cannot write the log {self.baseFilename}: {error.strerror}")


def write_traceback(world: Environment, error: BaseException) -> Path | None:
    """Append the traceback to the log and return its path; None if that fails."""
    path = world.options.log_file or world.paths.state / "kvcli.log"
    text = "".join(traceback.format_exception(error))
    try:
        private_folder(path.parent)
        append(path, f"{datetime.now().isoformat(timespec='seconds')} kvcli {__version__}\n{text}\n", LARGEST)
    except OSError:
        return None
    return path


# Errors of commands: printed in words or as JSON, with an exit code.


# The base class of the option parser's errors. Typer has its own copy of Click; older versions use the real Click.
UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

# error numbers of a disk that is full, failing, over quota, or read-only
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EBADF)
CROWDED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN)  # too many open files or processes


def report_usage_error(world: Environment, args: Sequence[str], problem: Any) -> int:
    """Report an error of the option parser as a UsageError; returns the exit code."""
    is_option = hasattr(problem, "option_name")
    message = str(problem.message if is_option else problem.format_message())
    message = message.replace("Value error, ", "").strip().rstrip(".")  # added by the validator in the parser
    if not message:  # a group without a command: its help was printed
        return ExitStatus.USAGE
    if (wrong := getattr(problem.__cause__, "errors", None)) is not None:  # pydantic's, whose words lack the value
        kind = {"int_parsing": "a whole number", "float_parsing": "a number"}.get(wrong()[0]["type"])
        message = f"{problem.param.opts[0]} takes {kind}, not {wrong()[0]['input']!r}" if kind else message
    context = getattr(problem, "ctx", None)
    path = context.command_path if context is not None else "kvcli"
    params, typed = context.command.params if context is not None else [], f"{' '.join(args)} ".replace("=", " ")
    known = {name for param in params for name in param.opts}
    former = {old: new for old, new in FORMER.items() if f" {old} " in typed and new.split()[0] in known}
    nearest = _nearest(problem.option_name, params) if is_option else []
    try_ = [*(former.values() or [f"did you mean {option}?" for option in nearest]), f"{path} --help-all"]
    lines = [f"{old} is now {new}" for old, new in former.items()]
    return report_error(world, args, UsageError(message[:1].lower() + message[1:], lines=lines, try_=try_))


def _nearest(typed: str, params: Sequence[Any]) -> list[str]:
    """Return options that may be meant: those that begin so, else the most similar. Leading dashes are ignored."""
    names = {name.lstrip("-"): name for param in params for name in param.opts if name.startswith("--")}
    word = typed.lstrip("-")
    near = [name for name in names if name.startswith(word)] or get_close_matches(word, names, 2)
    return [names[name] for name in near[:2]]


def report_error(world: Environment, args: Sequence[str], error: KvcliError) -> int:
    """Print an error, on stdout as `kvcli.error/1` with --json, else on stderr; returns the exit code."""
    try:
        # the parser may have failed before --json
        if not (world.options.json or "--json" in args) or not _as_json(world, args, error):
            from kvcli.render.terminal.errors import print_error

            print_error(Terminal.of(world, "stderr"), error)
        if world.options.verbose > 1:
            world.stderr.write("".join(traceback.format_exception(error)))
    except BrokenPipeError:
        return ExitStatus.CLOSED_PIPE
    return int(error.exit)


def _as_json(world: Environment, args: Sequence[str], error: KvcliError) -> bool:
    """Print an error as JSON. False if standard output cannot be written, as on a full disk."""
    from kvcli.schemas.turn import ErrorEvent, error_document

    document = error_document(error)
    try:
        print_json(world, ErrorEvent(event="error", error=document) if "--stream" in args else document)
    except BrokenPipeError:
        raise
    except OSError:
        return False
    return True


class Interrupted(KvcliError):
    code, exit = "interrupted", ExitStatus.INTERRUPTED


def interrupted(world: Environment, args: Sequence[str]) -> int:
    """Report Ctrl-C without a result: one line for people, one object with --json; returns the exit code."""
    if world.options.json or "--json" in args:
        if "--stream" in args or not getattr(world.stdout, "has_written", False):
            return report_error(world, args, Interrupted("interrupted before there was a result"))
    elif not world.options.quiet:
        with suppress(OSError, ValueError):  # the terminal may be closed
            world.stderr.write("interrupted\n")
    return ExitStatus.INTERRUPTED


def report_bug(world: Environment, args: Sequence[str], error: Exception) -> int:
    """Report a bug or an unforeseen error: one line for people, the traceback in the log."""
    known = machine_gave_out(error)
    if known is not None:
        known.__cause__ = error
        return report_error(world, args, known)
    log = write_traceback(world, error)
    first = str(error).strip().split("\n")[0]
    package = foreign_package(error)
    where = f"internal, while code of {package} was used" if package else "internal"
    report = f"to {package}" if package else "with the output of: kvcli doctor"
    known = KvcliError(
        f"{where}: {type(error).__name__}: {first}" if first else f"{where}: {type(error).__name__}",
        lines=[f"the traceback is in {log}"] if log else ["the log could not be written"],
        detail={"type": type(error).__name__, "log": str(log) if log else None, "package": package},
        try_=["the same command with -vv", f"report it {report}"],
    )
    known.__cause__ = error
    return report_error(world, args, known)


def foreign_package(error: Exception) -> str | None:
    """Return the package of another author whose code or object is nearest to the error; None = only kvcli's."""
    from kvcli.settings.schema import foreign

    packages = {target.partition(":")[0].partition(".")[0]: package for target, package in foreign().items()}
    met, objects = [], [getattr(error, "obj", None)]  # of an AttributeError: the object that lacks the attribute
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        met.append(str(frame.f_globals.get("__name__")))
        objects += frame.f_locals.values()
    met += [str((value if isinstance(value, type) else type(value)).__module__) for value in objects]
    return next((packages[top] for name in met if (top := name.partition(".")[0]) in packages), None)


def machine_gave_out(error: Exception) -> KvcliError | None:
    """Return a KvcliError for failures of the machine (no memory, disk full, no permission); None for others."""
    first = str(error).strip().split("\n")[0]
    number = error.errno if isinstance(error, OSError) else None
    # of a renamed file, the new name
    name = getattr(error, "filename2", None) or getattr(error, "filename", None)
    if number in CROWDED:
        try_ = ["ulimit -n 1024", "ulimit -u shows your limit of processes"]
        return DoesNotFit(
            f"the limit of open files or processes is reached: {first}", code="too_few_handles", try_=try_
        )
    if number == errno.ENAMETOOLONG:
        try_ = ["a shorter name", "kvcli doctor lists the folders in use"]
        return BadInput(f"a name is too long for this file system: {str(name)[:200]}", code="name_too_long", try_=try_)
    is_unmapped = isinstance(error, ImportError) and "failed to map" in first
    if is_out_of_memory(error) or number == errno.ENOMEM or is_unmapped:
        smaller = ["a smaller --ctx", "--quant int8", "close other programs"]
        return DoesNotFit("out of memory", code="out_of_memory", lines=[first] if first else [], try_=smaller)
    if isinstance(error, OSError) and error.errno in FULL:
        where = f" {name}" if name else ""
        return KvcliError(f"cannot write{where}: {error.strerror}", code="cannot_write")
    if isinstance(error, PermissionError) and error.filename:
        return BadInput(f"no permission for {name}: {error.strerror}", code="no_permission")
    return None
