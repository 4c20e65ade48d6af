"""`kvcli bench --engine openai` and `kvcli bench --serve`: speed of a server that runs, as its clients see it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, islice, pairwise
from random import Random, SystemRandom
from statistics import median, quantiles
from typing import TYPE_CHECKING

from kvcli.api import End, Text, Thought
from kvcli.bench.grid import contexts
from kvcli.bench.run import check_room
from kvcli.bench.workloads import WORKLOADS, Message, of_file
from kvcli.commands.bench.request import read_workloads, temperature
from kvcli.commands.common.exits import Interrupt
from kvcli.commands.common.flags import listed, tokens
from kvcli.commands.common.inputs import tell
from kvcli.commands.common.output import print_json, print_table
from kvcli.commands.common.remote_setup import remote_setup
from kvcli.commands.resident.ps import servers
from kvcli.engines.openai import BYTES, RemoteSession
from kvcli.errors import BadInput, ExitStatus, UsageError
from kvcli.render.bench.progress import progress
from kvcli.render.terminal.screen import Screen
from kvcli.schemas.bench import ServerBenchDocument, ServerBenchRow

if TYPE_CHECKING:
    from kvcli.commands.bench.options import BenchOptions
    from kvcli.documents import Document
    from kvcli.engine.stats import Stats
    from kvcli.environment import Environment

Answer = tuple[list[float], "Stats"]  # seconds from the request to each piece, and to the end
ALLOWED = set("model workloads ctx new reps warmup seed clients serve engine base_url key_file engine_timeout".split())
TURN = 0.618  # of a text between the beginnings of two prompts


def bench_server(world: Environment, options: BenchOptions) -> int:
    """Measure the server of --base-url, or with --serve the newest `kvcli serve` of this user."""
    clients, sizes, new = listed(options.clients or "1"), contexts(options.ctx or "2k"), tokens(options.new, "--new")
    if not clients or not all(n.isdecimal() and 0 < int(n) <= 1000 for n in clients):
        raise UsageError(f"--clients takes numbers from 1 to 1000, not {options.clients!r}", try_=["--clients 1,4"])
    if options.reps < 1 or options.warmup < 0:
        raise UsageError("-r takes a number from 1, and --warmup one from 0", try_=["-r 5 --warmup 1"])
    asked = replace(options.engine, engine="openai", base_url=_own(world, options)) if options.serve else options.engine
    setup = remote_setup(world, options, asked, {}, ALLOWED)
    (name, *others), files = read_workloads(setup, options.workloads)
    if others or len(sizes) > 1 or name == "random":
        raise UsageError("a server is asked with one --ctx and one --workload of words", try_=["--workload article"])
    session, asks = RemoteSession(setup.endpoint, setup.profile), prompts(name, files, sizes[0] - new, options.seed)
    check_room(sizes, new, session.limit, setup.name)
    drawn = {"max_new_tokens": new, "temperature": temperature(setup), "seed": options.seed}
    tell(world, session.cautions[0])
    rounds: dict[int, list[tuple[float, list[Answer]]]] = {int(n): [] for n in clients}
    with progress(Screen.of(world)) as bar, Interrupt() as cancel:

        def answer(messages: list[Message]) -> Answer:
            began, answering = time.perf_counter(), session.stream((), messages=messages, cancel=cancel, **drawn)
            events = [(time.perf_counter() - began, event) for event in answering]
            at = [seconds for seconds, event in events if isinstance(event, Text | Thought | End)]
            return at, next(event.turn.stats for _, event in events if isinstance(event, End))

        for i, n in enumerate([*rounds] * (options.warmup + options.reps)):
            bar.show(i, len(rounds) * (options.warmup + options.reps), f"{n} clients")
            with ThreadPoolExecutor(n) as pool:
                messages, began = [*islice(asks, n)], time.perf_counter()
                found = [*pool.map(answer, messages)]
            if cancel():
                raise KeyboardInterrupt
            rounds[n].append((time.perf_counter() - began, found))
    rows = [_row(n, its[options.warmup :]) for n, its in rounds.items()]
    if world.options.json:
        url, server = setup.server.url, session.info.backend
        print_json(world, ServerBenchDocument(url=url, server=server, model=setup.name, workload=name, rows=rows))
        return ExitStatus.OK
    figures = [row.document() | {"tok_s": median(row.tok_s)} for row in rows]
    cells = [["–" if n is None else f"{n:,.{3 * (type(n) is float)}f}" for n in one.values()] for one in figures]
    print_table(world, [[*figures[0]], *cells])
    return ExitStatus.OK


def prompts(name: str, files: Mapping[str, Document], n: int, seed: int) -> Iterator[list[Message]]:
    """Yield prompts of about n tokens, each with another place of the text at its beginning, and others in each run,
    which the server's caches do not have. Raises BadInput."""
    made, size, begin = of_file(files[name]) if name in files else WORKLOADS[name], BYTES * n, SystemRandom().random()
    for i in count():
        text = made.write(Random(seed + i), n)
        if len(text) < size:
            said = f"{name} is too short: it has {len(text):,} characters, and {n:,} tokens take {size:,}"
            raise BadInput(said, code="too_short", try_=["a smaller --ctx", "--workload with a longer text file"])
        at = int((begin + i * TURN) % 1 * len(text))
        yield made.ask((text[at:] + text[:at])[:size])


def _row(n: int, rounds: Sequence[tuple[float, list[Answer]]]) -> ServerBenchRow:
    answers = [one for _, found in rounds for one in found]
    stats, gaps = [one for _, one in answers], [b - a for at, _ in answers for a, b in pairwise(at[:-1])]
    drafted = sum(one.draft_tokens for one in stats)
    counts = {key: round(median(getattr(one, key) for one in stats)) for key in ("prompt", "cached", "new")}
    return ServerBenchRow(
        clients=n,
        answers=len(answers),
        **counts,
        tok_s=[sum(one.new for _, one in found) / seconds for seconds, found in rounds],
        first_token=median(at[0] for at, _ in answers),
        gap_p95=quantiles(gaps, n=20)[-1] if len(gaps) > 1 else None,
        acceptance_rate=sum(one.accepted_tokens for one in stats) / drafted if drafted else None,
        kv_bytes=max(one.kv_bytes for one in stats) or None,
    )


def _own(world: Environment, options: BenchOptions) -> str:
    """Return the address of the newest server of this user, with the model if one is typed."""
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
