"""The --pack option: the pack's model and settings, and options that may be combined with it."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import expanduser
from typing import TYPE_CHECKING

from kvcli.commands.common.inputs import tell
from kvcli.errors import UsageError

if TYPE_CHECKING:
    from kvcli.chat.document_pack import Pack
    from kvcli.commands.common.run_setup import Setup
    from kvcli.environment import Environment
    from kvcli.settings.profile import Profile


def pack_of(world: Environment, typed: str, others: Sequence[object], flags: str) -> Pack:
    """Open the pack, which has its own documents. Raises UsageError if one of the options `others` is typed too."""
    from kvcli.chat.document_pack import open_pack

    if any(others):
        raise UsageError(
            f"--pack goes without {flags}: what was read is in the pack",
            try_=["--pack NAME.kvs alone", "kvcli pack FILE... -o NAME.kvs, with all files and the system text"],
        )
    return open_pack(world.cwd / expanduser(typed))


def model_of(world: Environment, packed: Pack) -> str:
    """Return the model that made the pack. Raises BadInput if the model is not known here."""
    from kvcli.commands.chat.save_chat import known_here

    return known_here(world, packed.about.model, packed.folder.name, "packs")


def profile_of(setup: Setup, packed: Pack | None) -> Profile:
    """Return the profile typed, or else that of the pack with the settings of its KV cache, which are printed.

    Raises BadInput if the options typed contradict the settings of the pack.
    """
    if packed is None:
        return setup.profile()
    setup.usual, setup.packed = packed.about.profile, packed.about.settings
    profile = setup.profile()
    packed.refuse_under(profile)
    if setup.taken:
        said = ", ".join(f"{key}={value}" for key, value in setup.taken.items())
        tell(setup.world, f"settings of {packed.folder.name}: {said}")
    return profile
