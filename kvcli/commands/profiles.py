"""`kvcli profiles`: list, show, check, compare and write profiles."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvcli.commands.common.inputs import tell
from kvcli.commands.common.options import command
from kvcli.commands.common.output import print_json, print_lines, print_table
from kvcli.commands.common.run_setup import sources
from kvcli.environment import Environment
from kvcli.errors import BadInput, UsageError, writing
from kvcli.files import private_folder, write_private
from kvcli.settings.config import NAME, PROJECT_FILE, Config, Sources, load_config, no_such_profile, read_config
from kvcli.settings.problems import Problem, bad_config
from kvcli.settings.profile import Outcome, Profile, Rules, load_profile, resolve_profile
from kvcli.settings.profile_file import new_profile
from kvcli.settings.small_file import toml_value

SCHEMA = "kvcli.profiles/2"

app = typer.Typer(help="Named settings: list, show, compare, check.", add_completion=False)


@command(app, "list")
def list_(world: Environment) -> None:
    """List all profiles by purpose, with the exactness of their text and the profiles they extend."""
    config, rules = load_config(sources(world)), Rules.shipped()
    found = [resolve_profile(name, config, rules) for name in config.names()]
    if world.options.json:
        _json(world, profiles=[_entry(outcome, config) for outcome in found], default=config.default_profile)
    else:
        print_table(world, list_rows(found, config), drop=["extends", "for", "text"])


@command(app)
def show(
    world: Environment,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Default: the profile that chat uses.")] = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show the source of each value.")] = False,
) -> None:
    """Print all settings of a profile as TOML, with the environment and --set applied."""
    profile = load_profile(name or world.options.profile, sources=sources(world), sets=world.options.set)
    if world.options.json:
        _json(world, profiles=[_document(profile)])
    elif origin or world.options.plain:
        print_table(world, show_rows(profile, origin))
    else:
        print_lines(world, show_toml(profile))


@command(app)
def check(
    world: Environment,
    what: Annotated[str | None, typer.Argument(metavar="FILE|NAME", help="Default: all config files.")] = None,
) -> None:
    """Check profiles and print all problems with their lines. Exit code 9: problems were found."""
    names, problems = checked(what, sources(world), Rules.shipped())
    if problems:
        raise bad_config(problems)
    if world.options.json:
        _json(world, profiles=names, problems=[])
    else:
        print_lines(world, [f"no problems in {', '.join(names) or what}"])


@command(app)
def diff(
    world: Environment,
    a: Annotated[str, typer.Argument(metavar="A", help="First profile.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Second profile.")],
) -> None:
    """Compare two profiles, without settings from the environment."""
    files = replace(sources(world), environ={})
    one, two = (load_profile(name, sources=files) for name in (a, b))
    keys = [key for key in one.values | two.values if one.values.get(key) != two.values.get(key)]
    if world.options.json:
        changes = [{"key": key, "a": one.values.get(key), "b": two.values.get(key)} for key in keys]
        _json(world, profiles=[_document(one), _document(two)], differences=changes)
    elif keys:
        print_table(world, [["key", one.name, two.name], *([key, _value(one, key), _value(two, key)] for key in keys)])
    else:
        print_lines(world, [f"{one.name} and {two.name} have the same settings"])


@command(app)
def new(
    world: Environment,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new profile.")],
    extends: Annotated[str | None, typer.Option("--extends", metavar="NAME", help="Profile that it extends.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="File; - = stdout.")] = None,
) -> None:
    """Write a new profile file with all keys, commented out."""
    where = sources(world)
    config = load_config(where)
    if not NAME.fullmatch(name):
        raise UsageError(f"{toml_value(name)} is not a profile name: use letters, digits, dots, - and _")
    base = load_profile(extends or config.default_profile, sources=replace(where, environ={}))
    text = new_profile(name, base)
    if output == Path("-"):
        world.stdout.write(text)
        return
    if output is None and name in config.profiles:
        raise BadInput(
            f"there is a profile {toml_value(name)} already",
            lines=[_defined_in(name, config)],
            try_=[f"kvcli profiles show {name}", f"kvcli profiles new {name}-2"],
        )
    path = world.path(output) if output else world.paths.config / "profiles" / f"{name}.toml"
    write_new(path, text, where.shown(path))
    if world.options.json:
        _json(world, profiles=[name], file=str(path))
    else:
        print_lines(world, [where.shown(path)])


@command(app)
def export(
    world: Environment,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Profile.")],
    to: Annotated[Literal["vllm", "sglang", "llama-server", "hf"], typer.Option("--to", help="Engine.")],
) -> None:
    """Print the nearest settings of another engine: its command, or generation_config.json, and what is lost."""
    from kvcli.engines.export import export as exported

    profile = load_profile(name, sources=sources(world), sets=world.options.set)
    made = exported(profile, to)
    if world.options.json:
        _json(world, profiles=[name], export=made.document())
        return
    print_lines(world, [shlex.join(made.words)] if made.words else json.dumps(made.fields, indent=2).split("\n"))
    for kind, reasons in (("approximated", made.approximated), ("lost", made.lost)):
        for why in dict.fromkeys(reasons.values()):
            keys = [_assignment(key, profile.values[key]) for key in reasons if reasons[key] == why]
            tell(world, f"{kind}: {', '.join(keys)}: {why}")


def list_rows(found: Iterable[Outcome], config: Config) -> list[list[str]]:
    """Return a header and one table row per profile; the default profile is marked."""
    rows = [["profile", "for", "text", "", "extends", ""]]
    for outcome in found:
        name = outcome.profile.name
        broken = f"has problems: kvcli profiles check {name}"
        mark = "default" if name == config.default_profile else ""
        promise = "" if outcome.problems else outcome.profile.exactness
        about = broken if outcome.problems else outcome.profile.description
        extends = ", ".join(outcome.profile.extends) or "-"
        rows.append([name, outcome.profile.purpose, promise, mark, extends, about])
    return rows


def show_rows(profile: Profile, origin: bool) -> list[list[str]]:
    """Return table rows of key, value and, with `origin`, the origin of the value."""
    return [[key, _value(profile, key), *([profile.origins[key]] if origin else [])] for key in profile.values]


def show_toml(profile: Profile) -> list[str]:
    """Return the profile as dotted TOML keys below a comment line."""
    first = f"# {' -> '.join(profile.chain)}, hash {profile.hash}"
    about = [f"description = {toml_value(profile.description)}"] if profile.description else []
    return [first, *about, *(_assignment(key, value) for key, value in profile.values.items())]


def checked(what: str | None, where: Sources, rules: Rules) -> tuple[list[str], list[Problem]]:
    """Return the profiles that were checked, and the problems of the profiles and their files."""
    if what is None:
        config = read_config(where)
        return _all_problems(config, sorted(config.profiles), config.problems, rules)
    path = Path(expanduser(what))
    if "/" not in what and not what.endswith(".toml") and not path.is_file():
        config = load_config(where)
        if what not in config.profiles:
            raise no_such_profile(what, config)
        return _all_problems(config, [what], [], rules)
    path = path if where.cwd is None else where.cwd / path
    is_project = path.name == PROJECT_FILE  # project files have their own rules
    config = read_config(replace(where, cwd=path.parent) if is_project else replace(where, config=path))
    source = where.shown(path)
    made = {name: [each.origin.document for each in said.values()] for name, said in config.profiles.items()}
    named = [name for name, documents in made.items() if any(one.source == source for one in documents)]
    return _all_problems(config, named, [p for p in config.problems if p.place.source == source], rules)


def write_new(path: Path, text: str, shown: str) -> None:
    """Write a file that must not exist yet."""
    with writing(shown, try_=["-o FILE, another file"]):
        try:
            private_folder(path.parent)
            write_private(path, text, is_new=True)
        except FileExistsError:
            raise BadInput(f"{shown} exists already", try_=["-o FILE, another file"]) from None


def _all_problems(
    config: Config, names: Sequence[str], problems: Sequence[Problem], rules: Rules
) -> tuple[list[str], list[Problem]]:
    found = [problem for name in names for problem in resolve_profile(name, config, rules).problems]
    return list(names), [*problems, *found, *config.unknown_profiles()]


def _defined_in(name: str, config: Config) -> str:
    origins = {setting.origin.name for setting in config.profiles[name].values()}
    return f"defined in {sorted(origins)[0]}" if origins else f"level: {config.levels[name]}"


def _entry(outcome: Outcome, config: Config) -> dict[str, Any]:
    from kvcli.schemas.listings import ProfileEntry

    problems = [problem.as_detail() for problem in outcome.problems]
    level = config.levels[outcome.profile.name]
    return ProfileEntry.from_attributes(outcome.profile, level=level, problems=problems).document()


def _value(profile: Profile, key: str) -> str:
    """Return the value as TOML, for a table cell."""
    if key not in profile.values:
        return "-"
    value = profile.values[key]
    return "from the model" if value is None else toml_value(value)


def _assignment(key: str, value: object) -> str:
    return f"# {key}: from the model" if value is None else f"{key} = {toml_value(value)}"


def _document(profile: Profile) -> dict[str, Any]:
    from kvcli.schemas.listings import ProfileDocument

    return ProfileDocument.from_attributes(profile).document()


def _json(world: Environment, **fields: object) -> None:
    print_json(world, {"schema": SCHEMA, **fields})
