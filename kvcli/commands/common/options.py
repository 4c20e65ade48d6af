"""Options of a command: one frozen dataclass, from whose fields its parameters and its help are made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform, get_type_hints

import typer
import typer.main

from kvcli.commands.common.exits import start_log
from kvcli.environment import Environment
from kvcli.errors import UsageError

Run = TypeVar("Run", bound=Callable[..., int | None])


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a command, or a group of them: a frozen dataclass. A field is an option, an argument, or a group.

    `panel`, a keyword of the class, is the heading of its own options in the help.
    """

    panel: ClassVar[str | None] = None
    typed: Mapping[str, str] = field(default_factory=dict, repr=False)  # field -> flag, of those on the command line

    def __init_subclass__(cls, panel: str | None = None) -> None:
        cls.panel = panel
        dataclass(frozen=True, kw_only=True)(cls)

    def values(self) -> dict[str, Any]:
        """Return the values by field, those of groups among them."""
        found = dict[str, Any]()
        for name, value in vars(self).items():
            found |= value.values() if isinstance(value, Options) else {name: value} if name != "typed" else {}
        return found

    def refuse_others(self, mode: str, allowed: set[str]) -> None:
        """Refuse options that were typed and have no effect in this mode, because none is ignored silently."""
        typed = [flag for name, flag in self.typed.items() if name not in allowed]
        if typed:
            raise UsageError(f"{mode} excludes {', '.join(typed)}", try_=[f"leave out {' and '.join(typed)}"])


def option(
    *names: str,
    help: str,
    metavar: str | None = None,
    panel: str | None = None,
    rare: bool = False,
    count: bool = False,
) -> Any:
    """Return an option, shown in the help below the heading `panel`; --help-all alone shows rare options."""
    return typer.Option(
        *names, help=help, metavar=metavar, rich_help_panel=panel, show_default=False, hidden=rare, count=count
    )


def choice(*names: str, default: Any = None, **shown: Any) -> Any:
    """Return a field of Options: an option named like the field, or like the first of `names` that begins with `--`.

    `shown` is as for `option`; the panel is that of the class.
    """
    return field(default=default, metadata={"names": names, "shown": shown})


def flag(*names: str, **shown: Any) -> Any:
    """Return a field of Options that is False unless it is typed."""
    return choice(*names, default=False, **shown)


def command(app: typer.Typer, name: str | None = None) -> Callable[[Run], Run]:
    """Add a function to the commands of `app`. Its first parameter gets the environment, and one whose type is a class
    of Options gets an object of it; Typer makes the other parameters."""

    def register(run: Run) -> Run:
        hints = get_type_hints(run, include_extras=True)
        _, *rest = signature(run).parameters.values()
        shown = [one for each in rest for one in _parameters(each.replace(annotation=hints[each.name]))]

        def call(context: typer.Context, **given: Any) -> int | None:
            typed = _typed(context, given)
            return run(context.obj, **{each.name: _value(each.name, hints[each.name], given, typed) for each in rest})

        context = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        call.__signature__ = Signature([context, *shown])  # type: ignore[attr-defined]
        call.__name__, call.__doc__, call.__annotations__ = run.__name__, run.__doc__, {}
        app.command(name)(call)
        return run

    return register


def _typed(context: typer.Context, names: Collection[str]) -> dict[str, str]:
    """Return field -> flag, for the fields that were typed on the command line."""
    found = dict[str, str]()
    for param in context.command.params:
        source = context.get_parameter_source(str(param.name))
        if param.name in names and source is not None and source.name == "COMMANDLINE":
            found[param.name] = param.opts[0]
    return found


def _parameters(found: Parameter) -> Iterator[Parameter]:
    """Yield the parameters that stand for one: itself, or those of a group."""
    if not _is_group(found.annotation):
        yield found.replace(kind=Parameter.KEYWORD_ONLY)
        return
    for each, kind in _fields(found.annotation):
        if each.metadata:
            names, shown = each.metadata["names"], {"panel": found.annotation.panel} | each.metadata["shown"]
            if not any(name.startswith("--") for name in names):
                names = (f"--{each.name.strip('_').replace('_', '-')}", *names)
            kind = Annotated[kind, option(*names, **shown)]
        default = Parameter.empty if each.default is MISSING else each.default
        yield from _parameters(Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))


def _value(name: str, kind: Any, given: Mapping[str, Any], typed: Mapping[str, str]) -> Any:
    """Return the value of a parameter or field: as given, or the object of its group."""
    if not _is_group(kind):
        return given[name]
    return kind(typed=typed, **{each.name: _value(each.name, its, given, typed) for each, its in _fields(kind)})


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Options)


def _fields(group: type[Options]) -> list[tuple[Field[Any], Any]]:
    """Return the fields that are options, arguments or groups, with their types."""
    hints = get_type_hints(group, include_extras=True)
    return [(each, hints[each.name]) for each in fields(group) if each.name != "typed"]


def params_of(group: type[Options]) -> list[Any]:
    """Return the parameters of a group as the option parser has them."""
    app = typer.Typer(add_completion=False)

    def none(options: Options) -> None: ...

    none.__signature__ = Signature([*_parameters(Parameter("options", Parameter.KEYWORD_ONLY, annotation=group))])  # type: ignore[attr-defined]
    none.__annotations__ = {}
    app.command()(none)
    return list(typer.main.get_command(app).params)


# Options of every command, before or after its name: defined once, attached to all. Their values go to the world.

NARROW, LEAST = 60, 20  # columns: below NARROW, help has no boxes; LEAST is its minimum width
MODEL = "demo, a name from kvcli models suggest or your config, a folder, a GGUF file, or a Hugging Face id."
ModelOption = Annotated[str | None, option("--model", "-m", metavar="MODEL", help=MODEL, panel="The model")]


class NamedModel(Options):
    """The option --model of every command that has an argument MODEL."""

    model_: ModelOption = None


class CommonOptions(Options, panel="Options of every command"):
    profile: str | None = choice("-P", metavar="NAME", help="Profile (named settings).")
    set_: list[str] | None = choice(metavar="KEY=VALUE", help="Set one profile key, as in TOML; repeatable.")
    config: Path | None = choice(metavar="FILE", help="Additional config file; it overrides the others.", rare=True)
    json: bool = flag(help="Print one JSON object.")
    plain: bool = flag(help="No colour, no wrapping, no status row; tables with tabs.", rare=True)
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
    if value and named and value != named:
        raise UsageError(f"two models are named: {value} and --model {named}", try_=["only one of them"])
    return value or named


def _take(context: Any, param: Any, value: Any) -> None:
    """Add the typed options to `world.options`: lists grow, counts add up, of two values the later one wins."""
    world = context.obj
    if not isinstance(world, Environment) or value in (None, False, 0, []) or context.resilient_parsing:
        return
    name = param.name.rstrip("_")
    before = getattr(world.options, name)
    if name in ("config", "log_file"):
        value = Path(value)  # older Typers leave the conversion to the function, which these parameters do not have
    elif isinstance(before, list):
        value = [*before, *map(str, value)]
    elif isinstance(before, int) and not isinstance(before, bool):
        value = before + value
    setattr(world.options, name, value)
    if name in ("verbose", "log_file"):
        start_log(world)
    elif name == "offline":
        world.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads the variable when it is imported
