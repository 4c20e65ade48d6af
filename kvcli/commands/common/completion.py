"""Shell completion with the Tab key: names of models, profiles and chats, and values of settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from kvcli.commands import cache
from kvcli.commands.common.flags import KEYS
from kvcli.commands.common.run_setup import config_of, sources
from kvcli.commands.models.model_names import known
from kvcli.environment import Environment
from kvcli.errors import KvcliError
from kvcli.models.catalog import CATALOG
from kvcli.settings.profile import load_profile
from kvcli.settings.schema import METHOD_TABLES, TABLES, registries
from kvcli.settings.values import keys_of, words

Found = Mapping[str, str] | Iterable[str]  # words, with descriptions if there are any


def complete(param: Any, context: Any, incomplete: str) -> list[Any]:
    """Return the words for a parameter as the option parser passes them to the shell; none = complete file names."""
    world: Environment = context.find_root().obj
    metavar, name = param.metavar or "", param.opts[0]
    last = incomplete.rpartition(",")[2] if "," in metavar else incomplete
    before = incomplete[: len(incomplete) - len(last)]
    found: Found = [word for word in metavar.split("|") if word.islower()] if "|" in metavar else []
    kind = KINDS.get(f"{context.command_path.partition(' ')[2]} {metavar}") or KINDS.get(metavar) or KINDS.get(name)
    with suppress(KvcliError, OSError):  # the command itself reports errors of the files
        if kind is not None:
            found = kind(world)
        elif name in ("--set", "--vary"):
            key, equals, _ = incomplete.partition("=")
            every = () if equals else load_profile(sources=sources(world)).values
            found = [f"{key}={value}" for value in values(key)] if equals else [f"{one}=" for one in every]
        elif name in KEYS:
            found = found or values(KEYS[name])
    about = found if isinstance(found, Mapping) else {}
    return [
        SimpleNamespace(value=before + word, type="plain", help=about.get(word) or None)
        for word in found
        if word.startswith(last)
    ]


def values(key: str) -> list[str]:
    """Return the values of a profile key that accepts only certain words."""
    table, _, name = key.partition(".")
    if table in METHOD_TABLES and METHOD_TABLES[table][0] == name:
        return list(registries()[table])
    if key == "load.device":
        return ["auto", "cpu", "cuda", "mps"]
    its = keys_of(TABLES[table]) if table in TABLES else {}  # keys of methods are not in the table
    return words(its[name].hint) if name in its else []


def _profiles(world: Environment) -> Found:
    config = config_of(world)
    said = {name: config.profiles[name].get(("description",)) for name in config.names()}
    return {name: str(setting.value) if setting else "" for name, setting in said.items()}


def _chats(world: Environment) -> Found:
    from kvcli.commands.chat.save_chat import saved_chats_of

    return {entry.id: entry.title or "" for entry in saved_chats_of(world).entries()}


def _models(world: Environment) -> Found:
    return dict(known(config_of(world), world.paths.data))


# by the placeholder of a value in the help, after a command's name if it depends on that
KINDS: Mapping[str, Callable[[Environment], Found]] = {
    **dict.fromkeys(("MODEL", "models remove NAME"), _models),
    **dict.fromkeys(("A", "B", "--profile", "--profiles", "--extends", "profiles show NAME"), _profiles),
    "CHAT": _chats,
    "KIND": lambda _: {**cache.KINDS, **cache.BY_NAME},
    "models get NAME": lambda _: {one.name: one.about for one in CATALOG},
}
