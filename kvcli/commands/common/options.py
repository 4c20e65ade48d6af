"""Options of a command: one frozen dataclass, from whose fields its parameters and its help are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from kvcli.errors import UsageError

Run = TypeVar("Run", bound=Callable[..., int | None])


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a command, or a group of them. A field is an option, an argument, or a group held in its place."""

    typed: Mapping[str, str] = field(default_factory=dict, repr=False)  # field -> flag, of those on the command line

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

    `shown` is as for `option`.
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
            typed = {
                str(param.name): param.opts[0]
                for param in context.command.params
                if (at := context.get_parameter_source(str(param.name))) is not None and at.name == "COMMANDLINE"
            }
            return run(context.obj, **{each.name: _value(each.name, hints[each.name], given, typed) for each in rest})

        context = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        call.__signature__ = Signature([context, *shown])  # type: ignore[attr-defined]
        call.__name__, call.__doc__, call.__annotations__ = run.__name__, run.__doc__, {}
        app.command(name)(call)
        return run

    return register


def _parameters(found: Parameter) -> Iterator[Parameter]:
    """Yield the parameters that stand for one: itself, or those of a group."""
    group = found.annotation
    if not (isinstance(group, type) and issubclass(group, Options)):
        yield found.replace(kind=Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(group, include_extras=True)
    for each in fields(group):
        kind = hints[each.name]
        if each.metadata:
            names, shown = each.metadata["names"], each.metadata["shown"]
            long = (
                [] if any(name.startswith("--") for name in names) else [f"--{each.name.strip('_').replace('_', '-')}"]
            )
            kind = Annotated[kind, option(*long, *names, **shown)]
        if each.name != "typed":
            default = Parameter.empty if each.default is MISSING else each.default
            yield from _parameters(Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))


def _value(name: str, kind: Any, given: Mapping[str, Any], typed: Mapping[str, str]) -> Any:
    """Return the value of a parameter or field: as given, or the object of its group."""
    if not (isinstance(kind, type) and issubclass(kind, Options)):
        return given[name]
    hints = get_type_hints(kind, include_extras=True)
    return kind(typed=typed, **{n: _value(n, hint, given, typed) for n, hint in hints.items() if n != "typed"})
