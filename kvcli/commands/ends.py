"""How a command that went wrong ends: the error in words or as JSON, and its exit code."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import typer

from kvcli.commands.log import write_traceback
from kvcli.commands.show import print_json
from kvcli.errors import ExitStatus, KvcliError, UsageError
from kvcli.world import World

# The root of what the option parser raises; Typer carries its own copy of Click, or uses the real one when older.
UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def usage_error(problem: Any) -> UsageError:
    """What the option parser found, as one of our errors."""
    message = problem.format_message().strip().rstrip(".")
    context = getattr(problem, "ctx", None)
    path = context.command_path if context is not None else "kvcli"
    return UsageError(message[:1].lower() + message[1:], try_=[f"{path} --help"])


def failed(world: World, args: Sequence[str], error: KvcliError) -> int:
    """Say what went wrong, on stdout as `kvcli.error/1` with --json, else on stderr; returns the exit code."""
    try:
        if world.options.json or "--json" in args:  # the parser may have failed before it came to --json
            from kvcli.schemas import ErrorEvent, error_document

            document = error_document(error)
            print_json(world, ErrorEvent(event="error", error=document) if "--stream" in args else document)
        else:
            from kvcli.render.errors import print_error
            from kvcli.render.terminal import Terminal

            print_error(Terminal.of(world, "stderr"), error)
    except BrokenPipeError:
        return ExitStatus.CLOSED_PIPE
    if world.options.verbose > 1:
        world.stderr.write("".join(traceback.format_exception(error)))
    return int(error.exit)


def broke(world: World, args: Sequence[str], error: Exception) -> int:
    """A bug, or something nobody thought of: one line for people, the traceback in the log."""
    log = write_traceback(world, error)
    first = str(error).strip().split("\n")[0]
    known = KvcliError(
        f"internal: {type(error).__name__}: {first}" if first else f"internal: {type(error).__name__}",
        lines=[f"the traceback is in {log}"] if log else ["the log could not be written"],
        detail={"type": type(error).__name__, "log": str(log) if log else None},
        try_=["the same command with -vv", "report it with the output of: kvcli doctor"],
    )
    known.__cause__ = error
    return failed(world, args, known)
