"""Options of a command: one frozen dataclass, from whose fields its parameters and its help are made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform, get_origin, get_type_hints

import typer
import typer.main

from kvcli.errors import UsageError
from kvcli.settings.schema import LARGEST

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


def refuse_larger(flag: str, n: float) -> None:
    """Raise UsageError for a number above the largest one."""
    if n > LARGEST:
        raise UsageError(f"{flag} is {n:,}, and at most {LARGEST:,}", try_=[f"{flag} {LARGEST}"])


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
            for name, flag in typed.items():
                if isinstance(given[name], int | float) and name != "seed":
                    refuse_larger(flag, given[name])
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
        if not each.metadata and not _is_group(kind) and get_origin(kind) is not Annotated:
            raise TypeError(f"{found.annotation.__name__}.{each.name} is no choice; is its class decorated?")
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
