"""`kvcli config`: paths of files and folders, and the schemas of the JSON that kvcli prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvcli.chat.database import NAME as DATABASE
from kvcli.commands.common.options import command
from kvcli.commands.common.output import print_json, print_table
from kvcli.commands.common.run_setup import SYSTEM_CONFIG, sources
from kvcli.environment import Environment
from kvcli.errors import UsageError
from kvcli.fit.run_log import NAME as RUNS
from kvcli.models.catalog import NAME as MODELS

app = typer.Typer(add_completion=False, help="Paths of config files, and the schemas of the JSON output.")


@command(app)
def path(world: Environment) -> None:
    """List files and folders that kvcli reads and writes; - marks a path that does not exist."""
    if world.options.json:
        from kvcli.schemas.listings import PathsDocument

        print_json(world, PathsDocument(paths={name: str(p) for name, p in places(world).items()}))
        return
    rows = [[name, str(p), "" if p.exists() else "–"] for name, p in places(world).items()]
    print_table(world, [["what", "where", ""], *rows])


@command(app)
def schema(
    world: Environment,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="turn, error, ... Default: list them.")] = None,
) -> None:
    """Print the JSON Schema of a document."""
    from kvcli.schemas.documents import DOCUMENTS, json_schema

    if name is None:
        world.stdout.write("".join(f"{known}\n" for known in DOCUMENTS))
        return
    bare = name.removeprefix("kvcli.").partition("/")[0]
    if bare not in DOCUMENTS:
        raise UsageError(f"there is no schema {name!r}", try_=[f"kvcli config schema {n}" for n in DOCUMENTS])
    world.stdout.write(json.dumps(json_schema(bare), indent=2) + "\n")


def places(world: Environment) -> dict[str, Path]:
    """Return paths by name, in the order in which settings are read."""
    found = {"system": SYSTEM_CONFIG, "user": world.paths.config / "config.toml"}
    found["profiles"] = world.paths.config / "profiles"
    if project := sources(world).project():
        found["project"] = project
    if world.options.config:
        found["--config"] = world.options.config
    found["database"] = world.paths.data / DATABASE
    found["chats"] = world.paths.chats
    found["runs"] = world.paths.data / RUNS
    found["benchmarks"] = world.paths.data / "bench"
    found["models"] = world.paths.data / MODELS
    found["cache"] = world.paths.cache
    found["history"] = world.paths.state / "history"
    found["log"] = world.paths.state / "kvcli.log"
    return found
