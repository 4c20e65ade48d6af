"""`kvcli bench --engine openai` and `kvcli bench --serve`: the speed of a server that runs."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from kvcli.bench.grid import contexts
from kvcli.commands.common.flags import listed, tokens
from kvcli.commands.common.inputs import tell
from kvcli.commands.common.output import print_json, print_table
from kvcli.errors import BadInput, ExitStatus, UsageError

if TYPE_CHECKING:
    from kvcli.commands.bench.options import BenchOptions
    from kvcli.environment import Environment

ALLOWED = set("model workloads ctx new reps warmup seed clients serve engine base_url key_file engine_timeout".split())


def bench_server(world: Environment, options: BenchOptions) -> int:
    """Measure the server of --base-url, or with --serve the newest `kvcli serve` of this user."""
    from kvcli.bench.run import check_room
    from kvcli.bench.server import measure, prompts
    from kvcli.commands.bench.request import read_workloads, temperature
    from kvcli.commands.common.exits import Interrupt
    from kvcli.commands.common.remote_setup import remote_setup
    from kvcli.engines.openai import RemoteSession
    from kvcli.render.bench.progress import progress
    from kvcli.render.terminal.screen import Screen
    from kvcli.schemas.bench import ServerBenchDocument

    clients, sizes = listed(options.clients or "1"), contexts(options.ctx or "2k")
    if not clients or not all(n.isdecimal() and 0 < int(n) <= 1000 for n in clients):
        raise UsageError(f"--clients takes numbers from 1 to 1000, not {options.clients!r}", try_=["--clients 1,4"])
    if options.reps < 1 or options.warmup < 0:
        raise UsageError("-r takes a number from 1, and --warmup one from 0", try_=["-r 5 --warmup 1"])
    asked = replace(options.engine, engine="openai", base_url=_own(world, options)) if options.serve else options.engine
    setup, new = remote_setup(world, options, asked, {}, ALLOWED), tokens(options.new, "--new")
    names, files = read_workloads(setup, options.workloads)
    if len(names) > 1 or len(sizes) > 1 or names == ["random"]:
        raise UsageError("a server is asked with one --ctx and one --workload of words", try_=["--workload article"])
    session = RemoteSession(setup.endpoint, setup.profile)
    check_room(sizes, new, session.limit, setup.name)
    tell(world, session.cautions[0])
    with progress(Screen.of(world)) as bar, Interrupt() as cancel:
        rows = measure(
            session, prompts(names[0], files, sizes[0] - new, options.seed), [*map(int, clients)],
            (options.warmup, options.reps), cancel, bar.show,
            max_new_tokens=new, temperature=temperature(setup), seed=options.seed,
        )  # fmt: skip
    if world.options.json:
        facts = {"model": setup.name, "url": setup.server.url, "server": session.info.backend}
        print_json(world, ServerBenchDocument(**facts, workload=names[0], rows=rows))
        return ExitStatus.OK
    table = [["clients", "prompt", "cached", "new", "tok/s", "1st tok", "gap p95", "accepted", "KV MiB"]]
    for row in rows:
        parts = (row.gap_p95, "{:.3f} s", 1), (row.acceptance_rate, "{:.0%}", 1), (row.kv_bytes, "{:,.1f}", 1 << 20)
        rest = ["–" if value is None else shape.format(value / unit) for value, shape, unit in parts]
        counts = [f"{n:,}" for n in (row.clients, row.prompt, row.cached, row.new)]
        table.append([*counts, f"{median(row.tok_s):.1f}", f"{row.first_token:.2f} s", *rest])
    print_table(world, table)
    return ExitStatus.OK


def _own(world: Environment, options: BenchOptions) -> str:
    """Return the address of the newest server of this user, with the model if one is typed."""
    from kvcli.commands.resident.ps import servers

    if options.engine.engine or options.engine.base_url:
        raise UsageError("--serve and --engine exclude each other", try_=["only one of them"])
    for each in servers(world):
        if each.url and options.model in (None, each.model, each.path):
            return each.url
    ways = [
        f"kvcli serve {options.model or 'demo'}",
        "--engine openai --base-url URL, for a server that ps does not list",
    ]
    raise BadInput("no kvcli serve of this user has that model", code="no_server", try_=ways)
