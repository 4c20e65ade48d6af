"""Options of every command, before or after its name: defined once, attached to all."""

from __future__ import annotations

from copy import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

from kvcli.commands.common.exits import start_log
from kvcli.commands.common.flags import ModelOption
from kvcli.commands.common.options import Options, choice, flag, params_of
from kvcli.environment import Environment
from kvcli.errors import UsageError

NARROW, LEAST = 60, 20  # columns: below NARROW, help has no boxes; LEAST is its minimum width


class NamedModel(Options):
    """The option --model of every command that has an argument MODEL."""

    model_: ModelOption = None


class CommonOptions(Options, panel="Options of every command"):
    """Options of every command. Their values go to the world, see `_take`."""

    profile: str | None = choice("-P", metavar="NAME", help="Profile (named settings).")
    set_: list[str] | None = choice(metavar="KEY=VALUE", help="Set one profile key, as in TOML; repeatable.")
    config: Path | None = choice(metavar="FILE", help="Additional config file; it overrides the others.", rare=True)
    json: bool = flag(help="Print one JSON object.")
    plain: bool = flag(help="No colour, Markdown, wrapping or status row; tables with tabs.", rare=True)
    quiet: bool = flag("-q", help="Print only errors on stderr.")
    verbose: int = choice("-v", default=0, count=True, help="Print more details on stderr; -vv adds tracebacks.")
    log_file: Path | None = choice(metavar="FILE", help="Write the log to FILE.", rare=True)
    no_color: bool = flag(help="No colour.", rare=True)
    no_input: bool = flag(help="Never prompt for input.", rare=True)
    offline: bool = flag(help="Do not use the network.", rare=True)
    help_all: bool = flag(help="Help with all options.")


def take_common(command: Any, *, rare: bool = False, width: int = NARROW) -> Any:
    """Add the common options to a command and all its subcommands. `rare`: show rare options in the help, too.

    `width`: columns of the help.
    """
    if width < NARROW:
        _one_below_the_other(command, width)
    take_model(command)
    taken = {name for param in command.params for name in param.opts}
    command.params += [copy(param) for param in _params() if not taken & set(param.opts)]
    if rare:
        show_rare(command)
        _complete(command)
    command.context_settings = {**command.context_settings, "help_option_names": ["-h", "--help"]}
    help_ = command.get_help_option(command.context_class(command, **command.context_settings))
    for param in [*command.params, *filter(None, [help_])]:
        if getattr(param, "is_flag", False) or getattr(param, "count", False):
            param.metavar = ""  # Typer would write <bool>
    for below in getattr(command, "commands", {}).values():
        command.no_args_is_help = not getattr(command, "invoke_without_command", False)
        take_common(below, rare=rare, width=width)
    return command


def _one_below_the_other(command: Any, width: int) -> None:
    """Set the help to a form without boxes, which would cut option names: each option's help is below its name."""
    usual, formatter = command.context_class, command.context_class.formatter_class
    below = {"write_dl": lambda self, rows, *_: formatter.write_dl(self, rows, col_max=2)}
    command.context_class = type("Context", (usual,), {"formatter_class": type("Formatter", (formatter,), below)})
    command.context_settings = {**command.context_settings, "terminal_width": max(LEAST, width - 1)}
    command.rich_markup_mode = None
    command.short_help = (command.help or "").partition("\n")[0]  # uncut in the list of the parent command


def take_model(command: Any) -> None:
    """Add -m MODEL to commands with an argument MODEL, with the same meaning."""
    for model in [param for param in command.params if param.opts == ["model"]]:
        (named,) = params_of(NamedModel)
        named.expose_value, named.callback, model.callback = False, _note_model, _one_model
        command.params.append(named)
        for words in [param for param in command.params if param.opts == ["words"]]:
            words.callback = _more_words


def _complete(command: Any) -> None:
    """Add completion with the Tab key for values that the option parser does not know."""
    from kvcli.commands.common.completion import complete

    for param in command.params:
        if param.metavar:
            param.shell_complete = partial(complete, param)


def show_rare(command: Any) -> None:
    for param in command.params:
        param.hidden = False


@cache
def _params() -> tuple[Any, ...]:
    params = tuple(params_of(CommonOptions))
    for param in params:
        param.expose_value = False  # commands read `world.options` instead of eleven arguments each
        param.is_eager = param.name == "help_all"
        param.callback = _help_all if param.is_eager else _take
    return params


def _help_all(context: Any, param: Any, value: Any) -> None:
    if value and not context.resilient_parsing:
        show_rare(context.command)
        context.command.get_help_option(context).callback(context, param, value)


def _note_model(context: Any, param: Any, value: Any) -> None:
    context.meta["model"] = value  # the parser handles arguments after all options


def _one_model(context: Any, param: Any, value: Any) -> Any:
    """Return the model of the argument MODEL or of --model, which must not differ."""
    named = context.meta.get("model")
    is_word = value and (" " in value.strip() or "://" in value or (context.obj.path(value)).is_file())
    if named and is_word and any(one.opts == ["words"] for one in context.command.params):
        context.meta["words"] = (value,)
        return named
    if value and named and value != named:
        raise UsageError(f"two models are named: {value} and --model {named}", try_=["only one of them"])
    return value or named


def _more_words(context: Any, param: Any, value: Any) -> list[str]:
    """Return the words without an option, the first of which stood in the place of a model."""
    return [*context.meta.get("words", ()), *(value or ())]


def _take(context: Any, param: Any, value: Any) -> None:
    """Add the typed options to `world.options`: lists grow, counts add up, of two values the later one wins."""
    world = context.obj
    if not isinstance(world, Environment) or value in (None, False, 0, []) or context.resilient_parsing:
        return
    name = param.name.rstrip("_")
    before = getattr(world.options, name)
    if name in ("config", "log_file"):
        value = world.path(value)
    elif isinstance(before, list):
        value = [*before, *map(str, value)]
    elif isinstance(before, int) and not isinstance(before, bool):
        value = before + value
    setattr(world.options, name, value)
    if name in ("verbose", "log_file"):
        start_log(world)
    elif name == "offline":
        world.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads the variable when it is imported
