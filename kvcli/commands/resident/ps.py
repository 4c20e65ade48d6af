"""`kvcli ps`: the models that stay loaded for this user."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from kvcli.commands.common.options import command
from kvcli.commands.common.output import print_json, print_table
from kvcli.environment import Environment
from kvcli.errors import BadInput
from kvcli.render.terminal.terminal import clock, long_size
from kvcli.resident_client import connect, folder_of, residents

if TYPE_CHECKING:
    from kvcli.schemas.listings import ServerEntry

app = typer.Typer(add_completion=False)


@command(app)
def ps(world: Environment) -> None:
    """List the models that kvcli serve has loaded for other commands."""
    from kvcli.schemas.listings import ServersDocument

    document = ServersDocument(servers=servers(world))
    if world.options.json:
        print_json(world, document)
        return
    rows = [["model", "process", "memory", "commands", "runs for", "load settings"]]
    for each in document.servers:
        figures = [long_size(each.bytes), str(each.running), clock(each.seconds)]
        rows.append([each.model, str(each.pid), *figures, ", ".join(each.load)])
    print_table(world, rows, drop=["load settings", "runs for"])


def servers(world: Environment) -> list[ServerEntry]:
    """Return the resident processes that run, the newest first. Raises BadInput if their folder cannot be used."""
    import psutil

    from kvcli.schemas.listings import ServerEntry

    found = []
    try:
        for about in residents(folder_of(world.environ)):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                process = psutil.Process(about["pid"])
                figures = {
                    "running": len(process.children()),
                    "bytes": process.memory_info().rss,
                    "seconds": max(0.0, time.time() - about["since"]),
                }
                if (connection := connect(about)) is not None:
                    connection.close()
                    facts = {key: about[key] for key in ("model", "path", "load")} | {"url": about.get("url", "")}
                    found.append(ServerEntry(pid=about["server"], **facts, **figures))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise BadInput(str(error), code="folder_unusable", try_=[f"chmod 700 {folder_of(world.environ)}"]) from None
    return found
