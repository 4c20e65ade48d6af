"""Logging: to stderr with -v, to a file with --log-file, and to the user's log after an internal error."""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from kvcli.environment import Environment
from kvcli.errors import writing
from kvcli.files import append, private_folder
from kvcli.version import __version__

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
            from kvcli.render.terminal.terminal import Terminal

            self.is_told = True
            print_warning(
                Terminal.of(self.world, "stderr"), f"cannot write the log {self.baseFilename}: {error.strerror}"
            )


def log_path(world: Environment) -> Path:
    """Return the file for tracebacks of internal errors."""
    return world.options.log_file or world.paths.state / "kvcli.log"


def write_traceback(world: Environment, error: BaseException) -> Path | None:
    """Append the traceback to the log and return its path; None if that fails."""
    path = log_path(world)
    text = "".join(traceback.format_exception(error))
    try:
        private_folder(path.parent)
        append(path, f"{datetime.now().isoformat(timespec='seconds')} kvcli {__version__}\n{text}\n", LARGEST)
    except OSError:
        return None
    return path
