"""The command tree: all commands, and the conversion of errors to exit codes.

A command is imported when it runs, so `kvcli --help` imports neither torch nor transformers.
"""

from __future__ import annotations

import gc
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Annotated, Any, TextIO, cast

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from kvcli.commands.common.common_options import NARROW, take_common
from kvcli.commands.common.exits import press_again, start_log
from kvcli.commands.resident.fork_server import Forked
from kvcli.environment import Environment
from kvcli.errors import ExitStatus, KvcliError, UsageError
from kvcli.safe_output import LibraryStream
from kvcli.version import __version__

HOMES = {  # modules of commands with another name, or with several files
    "chat": "chat.command",
    "summarize": "summarize.command",
    "bench": "bench.command",
    "spec": "spec.command",
    "profile-heads": "heads.command",
    "models": "models.command",
    **{name: f"resident.{name}" for name in ("ps", "stop")},
}
COMMANDS = {
    "chat": "Chat with a model, or ask one question with -p.",
    "pack": "Prefill documents once and save them with their KV cache.",
    "summarize": "Summarize long documents, with verified page citations.",
    "serve": "Serve OpenAI's API over one model, for other programs.",
    "fit": "Estimate memory before loading: model, profile and context.",
    "bench": "Compare profiles: speed, memory, agreement, quality.",
    "top": "Load and speed of inference engines, live.",
    "spec": "Speculative decoding: measure and tune.",
    "profile-heads": "Analyze attention heads: which need the full context.",
    "profiles": "Profiles (named settings): list, show, compare, check.",
    "ps": "List the models that kvcli serve has loaded.",
    "stop": "End kvcli serve, for one model or for all.",
    "models": "Models: list, suggest, download, check, remove.",
    "chats": "Saved chats: list, search, show, export, remove.",
    "cache": "Cached files: show their size, and remove them.",
    "config": "Paths of config files, and the schemas of the JSON output.",
    "doctor": "Versions, devices, memory and paths, for a bug report.",
}
HABITS = {  # word of other programs -> command
    **dict.fromkeys(("run", "ask", "generate"), "chat"),
    **dict.fromkeys(("summary", "summarise", "tldr", "extract"), "summarize"),
    **dict.fromkeys(("list", "ls"), "models list"),
    **dict.fromkeys(("server", "start", "load", "keep"), "serve"),
    "info": "doctor",
    "estimate": "fit",
    **dict.fromkeys(("benchmark", "perf"), "bench"),
    "heads": "profile-heads",
    **dict.fromkeys(("history", "logs"), "chats list"),
    "sessions": "chats",
    "resume": "chat --resume",
    **dict.fromkeys(("pull", "get", "download", "import"), "models get"),
    **dict.fromkeys(("rm", "remove", "delete"), "models remove"),
    "show": "models show",
    "create": "profiles new",
    "templates": "profiles list",
    "prompt": "chat -p",
    "status": "ps",
    "unload": "stop",
}
ABSENT: dict[str, tuple[str, ...]] = {  # command names of other programs -> why there is none, and what to type instead
    **dict.fromkeys(("push", "cp"), ("kvcli does not copy or upload models", "kvcli models path MODEL")),
    "search": ("kvcli does not search the hub", "kvcli models suggest", "kvcli chats search WORDS"),
    "embed": ("kvcli has no embeddings", "kvcli --help"),
}

SHORT_HELP = """\
kvcli {version}: chat with long documents on your own machine.

  kvcli chat                             chat with the bundled demo model, which knows only its own reports
  kvcli chat MODEL -f a.md -p "Why?"     one question about a file
  kvcli summarize -m MODEL paper.pdf     a summary with page citations
  kvcli models suggest                   real models that fit this machine

MODEL is a name that kvcli models suggest lists, a Hugging Face id, a folder, or a name from your config.

kvcli --help lists all commands; kvcli COMMAND --help lists the main options of one, --help-all all of them.
"""


class Lazy(TyperCommand):
    """A command of the tree that is not imported yet."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        app = import_module(f"kvcli.commands.{HOMES.get(str(self.name), self.name)}").app
        rare, width = bool(extra.get("resilient_parsing")), parent.obj.width() if parent is not None else NARROW
        command = take_common(typer.main.get_command(app), rare=rare, width=width)
        command.name = self.name
        if isinstance(command, TyperGroup):
            command.resolve_command = partial(resolve, command)  # type: ignore[method-assign]
        return command.make_context(info_name, args, parent=parent, **extra)


class Tree(TyperGroup):
    """The root: commands by name, with a hint for names that other tools use."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = {name: Lazy(name, help=help) for name, help in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return resolve(self, ctx, args)


def resolve(group: TyperGroup, ctx: Any, args: list[str]) -> Any:
    """Return the command of a group that `args` begin with. Raises UsageError, with a hint for names of other tools."""
    name, path = args[0], ctx.command_path
    if name in group.commands or name.startswith("-") or ctx.resilient_parsing:
        return TyperGroup.resolve_command(group, ctx, args)
    why, *instead = ABSENT.get(name, ("",))
    habit = HABITS.get(name, "")
    own = _own(group, habit)
    if own or (habit and not (ctx.parent and " " in habit)):  # a hint of one group is wrong in another
        rest = [] if habit.endswith(("list", "ps")) else args[1:]
        instead = [f"{f'{path} {own}' if own else f'kvcli {habit}'} {shlex.join(rest)}".rstrip()]
    near = [f"{path} {command}" for command in get_close_matches(name, group.commands)]
    raise UsageError(
        f"there is no command {name!r}" + (f" of {path}" if ctx.parent else ""),
        lines=[why] if why else [],
        try_=instead or near or ([f"{path} --help"] if ctx.parent else [f"kvcli chat {name}", "kvcli --help"]),
    )


def _own(group: TyperGroup, habit: str) -> str:
    """Return the command of the group that does the same as `habit`; "" = none."""
    alike = (word for word, other in HABITS.items() if habit and other == habit)
    return next((word for word in (habit.rpartition(" ")[2], *alike) if word in group.commands), "")


app = typer.Typer(
    name="kvcli",
    cls=Tree,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Chat with long documents on your own machine: faster decoding with the same text, and visible memory use.",
)


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.", show_default=False)] = False,
) -> None:
    world: Environment = context.obj
    if version:
        world.stdout.write(f"kvcli {__version__}\n")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        world.stdout.write(SHORT_HELP.format(version=__version__))


def main() -> None:
    """Run the `kvcli` script."""
    if sys.stdout is None:  # started with >&-: an answer could not be printed, so no work is done
        sys.exit(ExitStatus.CLOSED_PIPE)
    # torch and transformers make a million permanent objects, whose garbage collection took a sixth of the start
    gc.set_threshold(1_000_000)
    sys.unraisablehook = press_again
    shared = status = command = None
    while status is None:
        try:
            world = Environment.real()
            world.is_own_process, world.shared = True, shared
            status = run(sys.argv[1:], world)
        except Forked as fork:  # in a process of its own, which has left the code of the parent's command
            fork.become()
            shared, command = world.shared, fork
            if shared is not None:
                shared.begin()
        except KeyboardInterrupt:
            if command is not None:
                command.tell_end(ExitStatus.INTERRUPTED)
            raise
    if command is not None:
        command.tell_end(status)
    if status and "TORCHELASTIC_RUN_ID" in world.environ:
        import_module("kvcli.commands.common.torchrun").end(world)
    if status == ExitStatus.CLOSED_PIPE and hasattr(signal, "SIGPIPE"):
        # Die of SIGPIPE, the default of programs; this also keeps Python from flushing into the pipe.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    sys.exit(status)


def _invoke(command: Any, args: Sequence[str], world: Environment) -> int:
    try:
        with command.make_context("kvcli", list(args), obj=world) as context:
            return int(command.invoke(context) or ExitStatus.OK)
    except typer.Exit as done:
        return int(done.exit_code)


def run(args: Sequence[str], world: Environment) -> int:
    """Run one command line in an environment and return its exit code. Errors become exit codes only here."""
    from kvcli.commands.common import exits

    start_log(world)
    world.paths.sweep()
    completes = "_KVCLI_COMPLETE" in world.environ  # completion: Typer prints words for the shell and exits
    command = take_common(typer.main.get_command(app), rare=completes, width=world.width())
    if completes:
        command.main(list(args), prog_name="kvcli", complete_var="_KVCLI_COMPLETE", obj=world)
    try:
        if world.is_own_process and "TORCHELASTIC_RUN_ID" in world.environ:
            from kvcli.commands.common.torchrun import join

            join(world, next((one for one in args if one in COMMANDS), ""), args)
        out, err = cast("TextIO", LibraryStream(world.stdout)), cast("TextIO", LibraryStream(world.stderr))
        with redirect_stdout(out), redirect_stderr(err):  # libraries write to Python's streams
            status = _invoke(command, args, world)
        world.stdout.flush()
        return status
    except SystemExit:  # rich, which prints the help, raises this if the pipe is closed
        return ExitStatus.CLOSED_PIPE
    except (KeyboardInterrupt, typer.Abort):
        return exits.interrupted(world, args)
    except KvcliError as error:
        return exits.report_error(world, args, error)
    except exits.UsageProblem as problem:
        return exits.report_usage_error(world, args, problem)
    except BrokenPipeError:
        return ExitStatus.CLOSED_PIPE
    except Exception as error:
        return exits.report_bug(world, args, error)
