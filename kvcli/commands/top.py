"""`kvcli top`: running and waiting requests, KV cache and speed of inference servers, live."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from kvcli.commands.common.exits import Interrupt
from kvcli.commands.common.options import Options, choice, command
from kvcli.commands.common.output import print_json, print_table
from kvcli.environment import Environment
from kvcli.errors import EngineUnreachable, ExitStatus, UsageError
from kvcli.render.terminal.screen import LiveRegion
from kvcli.render.terminal.tables import GAP, clip, columns, fitting
from kvcli.render.terminal.terminal import Terminal
from kvcli.schemas.listings import ServerLoad, TopDocument

app = typer.Typer(add_completion=False)

SHAPES = {  # by heading: field, and its format
    "running": ("running", "{:g}"), "waiting": ("waiting", "{:g}"), "KV": ("kv", "{:.0%}"),
    "tok/s": ("tok_s", "{:.1f}"), "read tok/s": ("read_tok_s", "{:.0f}"), "accepted": ("acceptance", "{:.0%}"),
    "first token": ("first_token", "{:.2f} s"),
}  # fmt: skip
# columns that a narrow terminal leaves out, in order
DROP = ("read tok/s", "accepted", "first token", "waiting", "KV", "running")

_URLS = "Addresses of vLLM, SGLang (--enable-metrics), llama-server (--metrics) or kvcli serve."


class TopOptions(Options, panel="The servers"):
    urls: Annotated[list[str], typer.Argument(metavar="URL", help=_URLS, show_default=False)]
    interval: float = choice(default=2.0, metavar="SECONDS", help="Time between two looks. Default: 2.")
    key_file: str | None = choice(metavar="FILE", help="Private file with the key of all these servers.")


@command(app)
def top(world: Environment, options: TopOptions) -> int:
    """Show load and speed of inference servers until Ctrl-C; in a pipe or with --json, once.

    KV is the used part of the KV cache; the rates are of the last interval.
    """
    from kvcli.commands.common.remote_setup import key_for
    from kvcli.engines.http import Refused, Server
    from kvcli.engines.metrics import figures, parsed

    if not 0.1 <= options.interval <= 3600:
        raise UsageError("--interval takes 0.1 to 3600 seconds", try_=["--interval 2"])
    bases = [url.rstrip("/").removesuffix("/v1") for url in options.urls]
    servers = [Server(url, key_for(world, options.key_file, url), 2.0, 5.0, 5.0, tries=1) for url in bases]
    looks: dict[str, tuple[float, Mapping[str, float]]] = {}

    def look(server: Server) -> ServerLoad:
        try:
            at, now = time.monotonic(), parsed("\n".join(server.lines("/metrics")))
        except (Refused, EngineUnreachable) as error:
            why = f"no metrics ({error.status})" if isinstance(error, Refused) else error.code
            return ServerLoad(url=server.url, error=why)
        then, before = looks.get(server.url, (at, {}))
        looks[server.url] = at, now
        return ServerLoad.from_attributes(url=server.url, **figures(now, before, at - then))

    out = Terminal.of(world, "stdout")
    region = LiveRegion(out) if out.live and not world.options.json else None
    with Interrupt(world.clock) as cancel:
        rows, is_more = [*map(look, servers)], True
        while is_more and not cancel():
            if region is not None:
                region.draw([], screen(rows, out.width - 1))
            until, is_more = time.monotonic() + options.interval, region is not None
            while time.monotonic() < until and not cancel():
                time.sleep(0.05)
            rows = rows if cancel() else [*map(look, servers)]
    if region is not None:
        region.close([])
    if world.options.json:
        print_json(world, TopDocument(servers=rows))
    else:
        print_table(world, table(rows), DROP)
    return ExitStatus.ENGINE_UNREACHABLE if all(row.error for row in rows) else ExitStatus.OK


def table(rows: Sequence[ServerLoad]) -> list[list[str]]:
    """Return a header, and a row for each server."""
    cells = [["-" if (v := getattr(row, c)) is None else s.format(v) for c, s in SHAPES.values()] for row in rows]
    named = zip(rows, cells, strict=True)
    return [["server", *SHAPES, ""], *([row.url.partition("://")[2], *each, row.error or ""] for row, each in named)]


def screen(rows: Sequence[ServerLoad], width: int) -> list[str]:
    """Return the table in lines of at most `width` columns; an error has the place of the figures."""
    cells = [[clip(name, width * 2 // 5), *figures] for name, *figures, _ in table(rows)]
    lines = columns(fitting(cells, width, DROP))
    start = max(len(name) for name, *_ in cells) + GAP
    for i, row in enumerate(rows, 1):
        lines[i] = f"{cells[i][0]:<{start}}{row.error}" if row.error else lines[i]
    return [clip(line, width) for line in lines]
