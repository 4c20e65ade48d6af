"""`kvcli keep`: load a model once, for the commands chat and summarize of this user."""

from __future__ import annotations

import gc
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING

import typer

from kvcli.commands.common import flags as o
from kvcli.commands.common.exits import insisting
from kvcli.commands.common.options import Options, choice, command
from kvcli.commands.resident.fork_server import ForkServer
from kvcli.commands.resident.ps import servers
from kvcli.environment import Environment
from kvcli.errors import UsageError
from kvcli.resident_client import facts, folder_of
from kvcli.settings.schema import Load
from kvcli.version import __version__

if TYPE_CHECKING:
    from kvcli.chat.shared_weights import SharedWeights
    from kvcli.commands.common.run_setup import Setup
    from kvcli.settings.profile import Profile

app = typer.Typer(add_completion=False)

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# Packages whose modules a command may import: a fork has them already
USED = "chat commands drafts engine fit kv methods policies prefix_cache render schemas summarize".split()


class KeepOptions(Options, panel="The model"):
    model: o.ModelName = None
    weights: o.Weights
    keep: str | None = choice(metavar="30m", help="End after this time without a command. Default: never.")
    force: o.Force = False
    allow_pickle: o.Pickle = False


@command(app)
def keep(world: Environment, options: KeepOptions) -> None:
    """Keep a model loaded, so that chat and summarize start at once.

    They use it by themselves while it runs, in any terminal, if they need the
    same files and load settings. Ctrl-C or kvcli stop ends it.
    """
    refuse_platform()
    same = facts(sys.argv, world.environ)  # before the imports: libraries set variables
    idle = seconds(options.keep)
    from kvcli.commands.common.load_model import MemoryWishes, prepare
    from kvcli.commands.common.run_setup import Setup
    from kvcli.render.terminal.screen import Screen

    screen = Screen.of(world)
    setup = Setup(world, options.model, o.profile_flags(options.values()), is_typed=options.model is not None)
    run = prepare(setup, setup.profile, MemoryWishes(options.force), screen.note)
    until = f"until {options.keep} pass without a command" if options.keep else "until Ctrl-C or kvcli stop"
    share(world, same, setup, run.profile, screen.note, until, idle)


def share(
    world: Environment,
    same: Mapping[str, str],
    setup: Setup,
    profile: Profile,
    tell: Callable[[str], None],
    until: str,
    idle: float | None = None,
    *,
    has_own: bool = False,
) -> int:
    """Load the model and fork commands. `same`: the facts of this process. `has_own`: run its own command in a fork.

    Returns the exit code of that; in the forks, `world.shared` has the weights. Raises Forked there.
    """
    load = [f"{key} = {value}" for key, value in asdict(profile.load).items() if value != getattr(Load(), key)]
    others = [each.pid for each in servers(world) if (each.model, each.load) == (setup.name, load)]
    if others and not has_own:
        try_ = ["kvcli ps", f"kvcli stop {setup.name}"]
        raise UsageError(f"{setup.name} is loaded already, by process {others[0]}", try_=try_)
    shared = world.shared = opened(setup, profile, tell)
    about = {"version": __version__, "facts": same, "model": setup.name, "path": str(shared.given.path), "load": load}
    tell(f"{setup.name} is loaded for kvcli chat and summarize, {until}")
    world.stdout.flush()
    world.stderr.flush()
    times = {"since": time.time(), "keep": idle, "own": int(has_own)}
    return ForkServer(tell, idle, has_own=has_own).run(folder_of(world.environ), about | times)


def opened(setup: Setup, profile: Profile, tell: Callable[[str], None]) -> SharedWeights:
    """Open the model's weights for the processes that are forked. Raises KvcliError for a GPU."""
    from kvcli.chat.shared_weights import SharedWeights
    from kvcli.engine.loading.weights import find_device, keeps_quantized
    from kvcli.fit import memory
    from kvcli.models.gguf import convert

    if (device := find_device(profile.load.device)).type != "cpu":
        raise UsageError(
            f"kvcli keep cannot share a model on {device}: processes cannot share its memory",
            try_=["--device cpu", "kvcli chat, which stays loaded as long as the chat lasts"],
        )
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


def can_share(profile: Profile) -> bool:
    """True if the weights can be shared with forked processes."""
    from kvcli.engine.loading.weights import find_device

    return sys.platform == "linux" and find_device(profile.load.device).type == "cpu"


def refuse_platform() -> None:
    """Raise UsageError on systems where a process that has imported torch cannot be forked safely."""
    if sys.platform != "linux":
        raise UsageError(
            f"kvcli keep needs Linux: on {platform.system()} a process with torch cannot be forked safely",
            try_=["kvcli chat, which stays loaded as long as the chat lasts"],
        )


def seconds(text: str | None) -> float | None:
    """Parse a time such as 30m; None = never. Raises UsageError."""
    if text is None:
        return None
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip())) is None or not float(match[1]):
        raise UsageError(f"--keep takes a time with its unit, not {text!r}", try_=["--keep 30m", "--keep 8h"])
    return float(match[1]) * UNITS[match[2]]
