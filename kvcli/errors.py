"""Errors a user can act on: what was asked, why it cannot be, and what to type instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit codes of every command; documented in docs/errors.md and never renumbered."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    BAD_INPUT = 3
    BAD_MODEL = 4
    DOES_NOT_FIT = 5
    CONTEXT_OVERFLOW = 6
    ENGINE_UNREACHABLE = 7
    BAD_OUTPUT = 8
    BAD_CONFIG = 9
    REGRESSION = 10
    INTERRUPTED = 130
    CLOSED_PIPE = 141


class KvcliError(Exception):
    """An error that is the user's to solve.

    `message` says what happened (one line), `detail` carries the numbers (lines for people, or a mapping for
    JSON), `try_` lists commands or changes that solve it. `code` is stable and greppable.
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


class UsageError(KvcliError):
    code, exit = "usage", ExitStatus.USAGE


class BadInput(KvcliError):
    code, exit = "bad_input", ExitStatus.BAD_INPUT


class BadModel(KvcliError):
    code, exit = "bad_model", ExitStatus.BAD_MODEL


class DoesNotFit(KvcliError):
    code, exit = "does_not_fit", ExitStatus.DOES_NOT_FIT


class ContextOverflow(KvcliError):
    code, exit = "context_overflow", ExitStatus.CONTEXT_OVERFLOW


class BadConfig(KvcliError):
    code, exit = "bad_config", ExitStatus.BAD_CONFIG
