"""Errors a user can act on: the request, the reason why it fails, and what to type instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any


class ExitStatus(IntEnum):
    """Exit codes of every command; documented in docs/reference/errors.md and never renumbered."""

    OK = 0  # done; includes leaving a chat, and --help
    INTERNAL = 1  # a fault of kvcli, or of a package that the message names; the log's path is printed
    USAGE = 2  # a wrong option or command
    BAD_INPUT = 3  # a file or a question that cannot be used
    BAD_MODEL = 4  # a model that is missing, damaged, or not supported
    DOES_NOT_FIT = 5  # more memory needed than available
    CONTEXT_OVERFLOW = 6  # the text is longer than the context window
    ENGINE_UNREACHABLE = 7  # a remote engine refused, timed out or was lost
    BAD_OUTPUT = 8  # an answer that breaks its schema or check, or ended in a loop
    BAD_CONFIG = 9  # a profile or a config file with problems
    REGRESSION = 10  # a condition of `bench --fail-if` is true
    INTERRUPTED = 130  # Ctrl-C in a run that asks nothing
    CLOSED_PIPE = 141  # the reader of the output closed it


class KvcliError(Exception):
    """Error that the user can solve.

    `message` is what happened (one line), `detail` has the numbers (lines for people, or a mapping for JSON), `try_`
    lists commands or changes that solve it. `code` is stable and greppable.
    """

    code = "internal"
    exit = ExitStatus.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        lines: Sequence[str] = (),
        detail: Mapping[str, object] | None = None,
        try_: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.lines = tuple(lines)
        self.detail = dict(detail or {})
        self.try_ = tuple(try_)

    def __str__(self) -> str:
        """The whole error as text, for a program that does not know its parts."""
        return "\n  ".join([self.message, *self.lines, *(f"try: {one}" for one in self.try_)])


class UsageError(KvcliError):
    code, exit = "usage", ExitStatus.USAGE


class BadInput(KvcliError):
    code, exit = "bad_input", ExitStatus.BAD_INPUT


class Busy(BadInput):
    """The queue of waiting requests is full. `retry_after`: seconds until it is likely to have room."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float, **told: Any) -> None:
        super().__init__(message, **told)
        self.retry_after = retry_after
        self.detail["retry_after"] = retry_after


class BadModel(KvcliError):
    code, exit = "bad_model", ExitStatus.BAD_MODEL


class DoesNotFit(KvcliError):
    code, exit = "does_not_fit", ExitStatus.DOES_NOT_FIT


class ContextOverflow(KvcliError):
    code, exit = "context_overflow", ExitStatus.CONTEXT_OVERFLOW


class EngineUnreachable(KvcliError):
    code, exit = "engine_unreachable", ExitStatus.ENGINE_UNREACHABLE


class BadConfig(KvcliError):
    code, exit = "bad_config", ExitStatus.BAD_CONFIG


@contextmanager
def reading(what: object, *, try_: Sequence[str] = ()) -> Iterator[None]:
    """Convert an OSError while reading a file that the user named into an error about that file."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"cannot read {what}: {error.strerror or error}", code="file_unreadable", try_=try_) from None


@contextmanager
def writing(what: object, *, try_: Sequence[str] = ()) -> Iterator[None]:
    """Convert an OSError while writing a file that the user named into an error about that file."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"cannot write {what}: {error.strerror or error}", code="file_unwritable", try_=try_) from None


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory allocation failed. torch has no common class for it: on the CPU it is a RuntimeError."""
    return isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or _NO_MEMORY in str(error)


_NO_MEMORY = "can't allocate memory"
