"""`kvcli.load`: load a model by name, with the settings and folders that the commands use.

No other module of the Python API reads the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.commands.common.run_setup import Setup, sources
from kvcli.environment import Environment
from kvcli.settings.profile import Profile

if TYPE_CHECKING:
    from kvcli.chat.model import Model


def load(
    model: str | None = None,
    profile: str | Profile | None = None,
    set: Mapping[str, object] | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    tell: Callable[[str], None] | None = None,
    cache: Path | None = None,
) -> Model:
    """Load a model by any name that a command takes: `demo`, of `kvcli models list`, a folder, a GGUF file, a hub id.

    Config files, `KVCLI_HOME`, the XDG folders and `KVCLI_...` settings apply as for a command; without a model or a
    profile, the config's defaults are used. `set` overrides profile keys: {"load.device": "cpu"}. A hub id at
    `revision` is downloaded only with `offline=False` and a `tell`, which is called with progress messages. `cache`:
    another folder for copies of GGUF files. Raises KvcliError subclasses.
    """
    world = Environment.real()
    world.environ = dict(world.environ)  # variables that loading sets must not change the caller's process
    world.options.offline = offline
    world.paths = replace(world.paths, cache=cache or world.paths.cache)
    setup = Setup(world, model, revision=revision)
    chosen = profile if isinstance(profile, Profile) else Profile.load(profile, sources=sources(world), model=model)
    chosen = setup.suited(chosen.changed(set, "set") if set else chosen)
    made = setup.load(chosen, tell, times=False)
    made.data = world.paths.data
    return made
