"""Errors of commands: printed in words or as JSON, with an exit code."""

from __future__ import annotations

import errno
import json
import re
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import typer

from kvcli.commands.common.log import write_traceback
from kvcli.commands.common.stdout import print_json
from kvcli.environment import Environment
from kvcli.errors import BadInput, DoesNotFit, ExitStatus, KvcliError, UsageError, is_out_of_memory
from kvcli.settings.renamed import FORMER

# The base class of the option parser's errors. Typer has its own copy of Click; older versions use the real Click.
UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

FILES = ["-f FOLDER, for the documents in it", "-f 'notes/*.txt', in quotes"]
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
    context = getattr(problem, "ctx", None)
    path = context.command_path if context is not None else "kvcli"
    params, typed = context.command.params if context is not None else [], f"{' '.join(args)} ".replace("=", " ")
    known = {name for param in params for name in param.opts}
    former = {old: new for old, new in FORMER.items() if f" {old} " in typed and new.split()[0] in known}
    nearest = _nearest(problem.option_name, params) if is_option else []
    question = re.search(r"extra arguments?(?:\(s\))? \((.*)\)$", message) if path.endswith(" chat") else None
    asks = [f"{path} MODEL -p {json.dumps(question[1], ensure_ascii=False)}"] if question else []
    # the shell expanded -f notes/* to many names, and the option takes one
    is_many = "extra argument" in message and any(param.name == "file" for param in params)
    try_ = [
        *asks,
        *(FILES if is_many else ()),
        *(former.values() or [f"did you mean {option}?" for option in nearest]),
        f"{path} --help-all",
    ]
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
            from kvcli.render.terminal.terminal import Terminal

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
    known = KvcliError(
        f"internal: {type(error).__name__}: {first}" if first else f"internal: {type(error).__name__}",
        lines=[f"the traceback is in {log}"] if log else ["the log could not be written"],
        detail={"type": type(error).__name__, "log": str(log) if log else None},
        try_=["the same command with -vv", "report it with the output of: kvcli doctor"],
    )
    known.__cause__ = error
    return report_error(world, args, known)


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
        return BadInput(
            f"a name is too long for this file system: {str(name)[:200]}",
            code="name_too_long",
            try_=["a shorter name", "kvcli doctor lists the folders in use"],
        )
    if (
        is_out_of_memory(error)
        or number == errno.ENOMEM
        or (isinstance(error, ImportError) and "failed to map" in first)
    ):
        smaller = ["a smaller --ctx", "--quant int8", "close other programs"]
        return DoesNotFit("out of memory", code="out_of_memory", lines=[first] if first else [], try_=smaller)
    if isinstance(error, OSError) and error.errno in FULL:
        where = f" {name}" if name else ""
        return KvcliError(f"cannot write{where}: {error.strerror}", code="cannot_write")
    if isinstance(error, PermissionError) and error.filename:
        return BadInput(f"no permission for {name}: {error.strerror}", code="no_permission")
    return None
