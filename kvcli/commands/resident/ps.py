"""`kvcli ps`: the models that stay loaded for this user."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import typer

from kvcli.commands.common.options import command
from kvcli.commands.common.output import print_json, print_table
from kvcli.environment import Environment
from kvcli.render.terminal.terminal import clock, long_size
from kvcli.resident_client import connect, folder_of, residents

if TYPE_CHECKING:
    from kvcli.schemas.listings import ServerEntry

app = typer.Typer(add_completion=False)


@command(app)
def ps(world: Environment) -> None:
    """List the models that kvcli keep has loaded."""
    from kvcli.schemas.listings import ServersDocument

    document = ServersDocument(servers=[entry(each) for each in alive(world)])
    if world.options.json:
        print_json(world, document)
        return
    rows = [["model", "process", "memory", "commands", "runs for", "ends after", "load settings"]]
    for each in document.servers:
        ends = "" if each.keep is None else clock(each.keep)
        figures = [long_size(each.bytes), str(each.running), clock(each.seconds), ends]
        rows.append([each.model, str(each.pid), *figures, ", ".join(each.load)])
    print_table(world, rows, drop=["load settings", "ends after", "runs for"])


def alive(world: Environment) -> list[dict[str, Any]]:
    """Return the descriptions of the resident processes that run."""
    found = []
    with suppress(FileNotFoundError):
        for each in residents(folder_of(world.environ)):
            if (connection := connect(each)) is not None:
                connection.close()
                found.append(each)
    return found


def entry(about: dict[str, Any]) -> ServerEntry:
    import psutil

    from kvcli.schemas.listings import ServerEntry

    process = psutil.Process(about["pid"])
    return ServerEntry(
        model=about["model"],
        path=about["path"],
        pid=about["pid"],
        load=about["load"],
        seconds=max(0.0, time.time() - about["since"]),
        keep=about["keep"],
        running=len(process.children()),
        bytes=process.memory_info().rss,
    )
