"""Load a model once, for the process of `kvcli serve` and for those of other commands, which share its weights."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import TYPE_CHECKING

from kvcli.commands.common.exits import insisting
from kvcli.commands.resident.fork_server import serve_commands
from kvcli.environment import Environment
from kvcli.resident_client import folder_of
from kvcli.settings.schema import Load
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.chat.shared_weights import SharedWeights
    from kvcli.commands.common.run_setup import Setup
    from kvcli.settings.profile import Profile

# Packages whose modules a command may import: a fork has them already
USED = "chat commands drafts engine fit kv methods policies prefix_cache render schemas summarize".split()


def url_of(listener: socket.socket) -> str:
    """Return the address of the API that is served there."""
    address, port = listener.getsockname()[:2]
    return f"http://{f'[{address}]' if ':' in address else address}:{port}/v1"


def can_share(profile: Profile) -> bool:
    """True if the weights can be shared with forked processes: not those on a GPU, and torch forks safely on Linux."""
    from kvcli.engine.loading.weights import find_device

    return sys.platform == "linux" and find_device(profile.load.device).type == "cpu"


def share(
    world: Environment,
    same: Mapping[str, str],
    setup: Setup,
    profile: Profile,
    tell: Callable[[str], None],
    listener: socket.socket,
) -> Path:
    """Load the model to `world.shared`, and fork the process that forks commands. Returns the file of their numbers.

    `same`: the facts of this process. `listener`: closed in that process. Raises Forked in those of commands.
    """
    load = [f"{key} = {value}" for key, value in asdict(profile.load).items() if value != getattr(Load(), key)]
    shared = world.shared = opened(setup, profile, tell)
    about = {"version": __version__, "facts": same, "model": setup.name, "path": str(shared.given.path), "load": load}
    times = {"server": os.getpid(), "since": time.time(), "url": url_of(listener)}
    world.stdout.flush()
    world.stderr.flush()
    if parent := os.fork():
        tell(f"{setup.name} is loaded for kvcli chat and summarize, too")
        return Path(f"/proc/{parent}/task/{parent}/children")
    listener.close()
    os.setsid()  # without a terminal: commands could not read from that of another session
    try:
        serve_commands(folder_of(world.environ), about | times)
    except OSError as error:  # no place for its socket: the server goes on without it
        tell(f"kvcli chat and summarize load the model themselves: {error}")
    os._exit(0)


def opened(setup: Setup, profile: Profile, tell: Callable[[str], None]) -> SharedWeights:
    """Open the model's weights for the processes that are forked."""
    from kvcli.chat.shared_weights import SharedWeights
    from kvcli.engine.loading.weights import keeps_quantized
    from kvcli.fit import memory
    from kvcli.models.gguf import convert

    with insisting():
        for package in USED:
            for module in walk_packages(import_module(f"kvcli.{package}").__path__, f"kvcli.{package}."):
                import_module(module.name)
        given, cache = setup.fetch(profile, tell), setup.world.paths.cache
        keeps_on = keeps_quantized(profile.load, given)
        found = convert.convert_if_needed(given, profile.load.dtype, cache, keeps_on=keeps_on, tell=tell)
        shared = SharedWeights.open(given, found, profile.load, memory.here())
    import psutil

    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all objects
    assert threading.active_count() == 1, f"a fork would lack {threading.enumerate()[1:]}"
    assert not psutil.Process().children(), "forks would share the pipes of a process"
    return shared
