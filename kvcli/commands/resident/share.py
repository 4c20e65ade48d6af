"""Load a model once, for processes that share its weights: that of `kvcli serve`, and those of other commands."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING

from kvcli.commands.common.exits import insisting
from kvcli.commands.resident.fork_server import ForkServer
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


def can_share(profile: Profile) -> bool:
    """True if the weights can be shared with forked processes: not those on a GPU, and torch forks safely on Linux."""
    from kvcli.engine.loading.weights import find_device

    return sys.platform == "linux" and find_device(profile.load.device).type == "cpu"


def share(
    world: Environment, same: Mapping[str, str], setup: Setup, profile: Profile, tell: Callable[[str], None]
) -> int:
    """Load the model, and run this command and those of clients in forks. `same`: the facts of this process.

    Returns the exit code of this command. Raises Forked in the forks, where `world.shared` has the weights.
    """
    load = [f"{key} = {value}" for key, value in asdict(profile.load).items() if value != getattr(Load(), key)]
    shared = world.shared = opened(setup, profile, tell)
    about = {"version": __version__, "facts": same, "model": setup.name, "path": str(shared.given.path), "load": load}
    tell(f"{setup.name} is loaded for kvcli chat and summarize, too")
    world.stdout.flush()
    world.stderr.flush()
    return ForkServer(tell).run(folder_of(world.environ), about | {"since": time.time()})


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
        packs, cache = keeps_quantized(profile.load), setup.world.paths.cache
        given = setup.fetch(profile, tell)
        found = convert.convert_if_needed(given, profile.load.dtype, cache, packs=packs, tell=tell)
        shared = SharedWeights.open(given, found, profile.load, memory.here())
    import psutil

    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all objects
    assert threading.active_count() == 1, f"a fork would lack {threading.enumerate()[1:]}"
    assert not psutil.Process().children(), "forks would share the pipes of a process"
    return shared
