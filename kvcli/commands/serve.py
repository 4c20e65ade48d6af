"""`kvcli serve`: OpenAI's API over one loaded model, for other programs of this machine."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from kvcli.commands.common import flags as o
from kvcli.commands.common.exits import machine_gave_out, write_traceback
from kvcli.commands.common.inputs import tell
from kvcli.commands.common.key_file import read_key
from kvcli.commands.common.options import Options, choice, command
from kvcli.commands.common.output import print_json
from kvcli.environment import Environment
from kvcli.errors import BadInput, ExitStatus, KvcliError, UsageError
from kvcli.installing import EXTRAS, pip
from kvcli.render.terminal.terminal import long_size, plural
from kvcli.resident_client import facts
from kvcli.schemas.listings import ServeDocument
from kvcli.settings.schema import SIZE, size_of

if TYPE_CHECKING:
    from kvcli.chat.model import Model
    from kvcli.serve.host import Host
    from kvcli.settings.profile import Profile

app = typer.Typer(add_completion=False)


class ServeOptions(Options, panel="The server"):
    model: o.ModelName = None
    port: int = choice(default=8642, metavar="N", help="Port; 0 = a free one. Default 8642.")
    host: str = choice(default="127.0.0.1", metavar="ADDRESS", help="Address. Others than this machine's need a key.")
    key_file: Path | None = choice(metavar="FILE", help="File with the key that requests need, readable by you alone.")
    allow_host: list[str] | None = choice(metavar="NAME", help="Serve requests to this host name, too. Repeatable.")
    allow_origin: list[str] | None = choice(metavar="URL", help="Let web pages of this origin ask. Repeatable.")
    kv: str | None = choice(metavar="SIZE", help="Memory for the KV of all conversations. Default: what is free.")
    idle_kv: str = choice(default="1GiB", metavar="SIZE", help="KV kept between requests. Default 1GiB.")
    queue: int = choice(default=256, metavar="N", help="Answers that may wait for memory. Default 256.")
    grace: float = choice(default=30.0, metavar="S", help="After Ctrl-C, time for running answers. Default 30 s.")
    keep: float = choice(default=0.0, metavar="S", help="End after S seconds without use. Default 0: never.")
    run: o.RunOptions


@command(app)
def serve(world: Environment, options: ServeOptions) -> int:
    """Serve OpenAI's API over one model, for other programs on this machine.

    Prints one line with the address. Ctrl-C ends it: running answers get
    --grace seconds, and a second Ctrl-C ends them at once.
    """
    try:
        from kvcli.serve.gate import is_loopback
        from kvcli.serve.host import Host, served_profiles
    except ImportError as error:
        said = f"the server needs {error.name}, which is not installed"
        raise BadInput(said, code="missing_extra", try_=[pip(*EXTRAS["serve"])]) from None
    from kvcli.chat.admission import EngineLimits
    from kvcli.commands.common.load_model import MemoryWishes, load_model, prepare
    from kvcli.commands.common.run_setup import Setup
    from kvcli.commands.resident.share import can_share, share
    from kvcli.render.terminal.screen import Screen

    same = facts(sys.argv, world.environ) if sys.platform == "linux" else {}  # first: libraries set variables
    key = read_key(world, options.key_file, least=16).encode() if options.key_file else None
    if key is None and not is_loopback(options.host):
        said = f"{options.host} is not an address of this machine alone, and a server for others needs a key"
        raise UsageError(said, try_=["--key-file FILE", "leave --host out"])
    for flag, typed in (("--kv", options.kv or "1GiB"), ("--idle-kv", options.idle_kv)):
        if not re.fullmatch(SIZE.pattern, typed):
            raise UsageError(f"{flag} takes {SIZE.words}, not {typed!r}", try_=[f"{flag} 1GiB"])
    if options.queue < 1 or not options.grace >= 0 or not options.keep >= 0:
        ways = ["--queue 256 --grace 30 --keep 1800"]
        raise UsageError("--queue takes a number from 1, --grace and --keep one from 0", try_=ways)
    setup = Setup(world, options.model, o.profile_flags(options.values()), options.run.exact, reuses=True)
    setup.look(setup.profile)
    screen, wanted = Screen.of(world), MemoryWishes(options.run.force, options.run.ctx == "max")
    commands: Path | None = None  # lists the processes of commands
    with listen(options.host, options.port) as listener:
        if world.shared is None and not options.run.no_server and can_share(setup.profile):
            fitted = prepare(setup, setup.profile, wanted, screen.note).profile
            commands = share(world, same, setup, fitted, screen.note, listener)
        run, session = load_model(setup, setup.profile, wanted, screen)
        session.close()
        for note in run.notes:
            screen.note(note)
        others: list[Profile] = []
        for name in setup.config.names():
            with suppress(KvcliError):  # it conflicts with the settings of the command line
                others.append(run.resolve(name, world.options.set))
        profiles = served_profiles(run.profile, others)
        model = cast("Model", session.model)
        if model.costs is None and any(one.spec.method != "off" for one in profiles.values()):
            model.costs = setup.costs(model)
        pool = size_of(options.kv) if options.kv else None
        model.engine.limits = EngineLimits(pool_bytes=pool, queue=options.queue)
        host = Host(model, setup.name, profiles, partial(_bug, world), idle_bytes=size_of(options.idle_kv))
        return _run(world, options, host, listener, key, commands)


def _bug(world: Environment, error: Exception) -> KvcliError:
    """Report an unforeseen error, and return what the client is told."""
    log = write_traceback(world, error)
    tell(world, f"internal error: {type(error).__name__}; the traceback is in {log}")
    return machine_gave_out(error) or KvcliError("internal error; the log of the server has more")


def _run(
    world: Environment,
    options: ServeOptions,
    host: Host,
    listener: socket.socket,
    key: bytes | None,
    commands: Path | None,
) -> int:
    """Serve until Ctrl-C or SIGTERM, or until nothing has used the server for `options.keep` seconds."""
    from uvicorn import Config, Server

    from kvcli.serve.app import server_app
    from kvcli.serve.gate import HEAD, PATIENCE, PatientProtocol

    hosts = [name.lower() for name in (options.host, *(options.allow_host or ()))]
    origins = [url.lower().rstrip("/") for url in options.allow_origin or ()]
    config = Config(
        server_app(host, hosts=hosts, origins=origins, key=key),
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # the application logs each request
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=HEAD,
        timeout_keep_alive=int(PATIENCE),
        timeout_graceful_shutdown=options.grace,  # type: ignore[arg-type]  # seconds for asyncio.wait_for
    )

    class Draining(Server):
        requests, used = 0, time.monotonic()  # of the last tick with a request or a command

        async def on_tick(self, counter: int) -> bool:
            n, running = self.server_state.total_requests, bool(self.server_state.tasks)
            if options.keep and (running or n > self.requests or (commands and commands.read_text())):
                self.requests, self.used = n, time.monotonic()
            return await super().on_tick(counter) or time.monotonic() - self.used > options.keep > 0

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if n := len(self.server_state.tasks):
                tell(world, f"finishing {plural(n, 'answer')} for up to {options.grace:g} s; Ctrl-C ends now")
            await super().shutdown(sockets)

    server = Draining(config)

    async def main() -> None:
        try:
            await server.serve([listener])
        finally:
            await host.aclose()

    show(world, listener, host)
    try:
        asyncio.run(main())
    except KeyboardInterrupt:  # uvicorn raises it again after the end
        return ExitStatus.INTERRUPTED if server.force_exit else ExitStatus.OK
    return ExitStatus.OK


def show(world: Environment, listener: socket.socket, host: Host) -> None:
    """Print the address, the model, and what the server promises."""
    model, name = host.model, host.name
    from kvcli.commands.resident.share import url_of

    url, room = url_of(listener), model.engine.snapshot().pool_bytes
    if world.options.json:
        about = ServeDocument(
            url=url, model=name, profile=model.profile.name, exactness=model.exactness_label, kv_bytes=room
        )
        print_json(world, about)
    else:
        kv = f", {long_size(room)} for KV" if room else ""
        world.stdout.write(f"{url}  {name}, profile {model.profile.name}, {model.exactness_label}{kv}\n")
    world.stdout.flush()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, before the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        said = f"cannot listen on {host} port {port}: {why}"
        raise BadInput(said, code="no_port", try_=["--port 0, which takes a free one"]) from None
