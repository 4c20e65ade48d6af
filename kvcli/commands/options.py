"""The options every command takes, before or after its name: defined once, attached to all."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main

from kvcli.commands.log import start_log
from kvcli.world import World

PANEL = "Options of every command"


def _option(*names: str, help: str, metavar: str | None = None, count: bool = False) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, count=count, show_default=False, rich_help_panel=PANEL)


def _common(
    profile: Annotated[str | None, _option("--profile", "-P", metavar="NAME", help="Settings to use.")] = None,
    set_: Annotated[
        list[str] | None, _option("--set", metavar="KEY=VALUE", help="One profile key, as in TOML; repeatable.")
    ] = None,
    config: Annotated[Path | None, _option("--config", metavar="FILE", help="One more config file, on top.")] = None,
    json: Annotated[bool, _option("--json", help="Print one JSON object.")] = False,
    plain: Annotated[bool, _option("--plain", help="No colour, no wrapping, no live row; tabs in tables.")] = False,
    quiet: Annotated[bool, _option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
    verbose: Annotated[
        int, _option("--verbose", "-v", count=True, help="Say more on stderr; twice for tracebacks.")
    ] = 0,
    log_file: Annotated[Path | None, _option("--log-file", metavar="FILE", help="Write the log there.")] = None,
    no_color: Annotated[bool, _option("--no-color", help="No colour.")] = False,
    no_input: Annotated[bool, _option("--no-input", help="Never ask anything.")] = False,
    offline: Annotated[bool, _option("--offline", help="Use no network.")] = False,
) -> None:
    """Typer reads these annotations; the values go to the world, see `_take`."""


def take_common(command: Any) -> Any:
    """Give a command, and all commands below it, the common options."""
    taken = {name for param in command.params for name in param.opts}
    command.params += [param for param in _params() if not taken & set(param.opts)]
    command.context_settings = {**command.context_settings, "help_option_names": ["-h", "--help"]}
    help_ = command.get_help_option(command.context_class(command, **command.context_settings))
    for param in [*command.params, *filter(None, [help_])]:
        if getattr(param, "is_flag", False) or getattr(param, "count", False):
            param.metavar = ""  # Typer would write <bool>
    for below in getattr(command, "commands", {}).values():
        command.no_args_is_help = not getattr(command, "invoke_without_command", False)
        take_common(below)
    return command


@cache
def _params() -> tuple[Any, ...]:
    app = typer.Typer(add_completion=False)
    app.command()(_common)
    params = tuple(typer.main.get_command(app).params)
    for param in params:
        param.expose_value = False  # commands read `world.options` instead of eleven arguments each
        param.callback = _take
    return params


def _take(context: Any, param: Any, value: Any) -> None:
    """Add what was typed to the world's options: lists grow, counts add up, of two values the later one wins."""
    world = context.obj
    if not isinstance(world, World) or value in (None, False, 0, []) or context.resilient_parsing:
        return
    name = param.name.rstrip("_")
    before = getattr(world.options, name)
    if name in ("config", "log_file"):
        value = Path(value)  # older Typers leave that to the function that these parameters do not have
    elif isinstance(before, list):
        value = [*before, *_strings(value)]
    elif isinstance(before, int) and not isinstance(before, bool):
        value = before + value
    setattr(world.options, name, value)
    if name in ("verbose", "log_file"):
        start_log(world)
    elif name == "offline":
        world.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads it then


def _strings(values: Iterable[object]) -> list[str]:
    return [str(value) for value in values]
