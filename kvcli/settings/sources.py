"""Sources of settings: files in order of precedence, the environment, `--set` and flags, each with its position."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from os.path import exists  # unlike Path.exists, False instead of an error below a folder without access
from pathlib import Path

import tomli

from kvcli.settings.problems import Problem, SourcePosition
from kvcli.settings.settings import Setting, Settings, Typed, leaves
from kvcli.settings.toml_positions import Document, Keys, Level, decode_document, read_document, toml_value

PROJECT_FILE = ".kvcli.toml"
PREFIX = "KVCLI_"


@dataclass(frozen=True)
class Sources:
    """Inputs of a profile. The default has only the built-in profiles."""

    system: Path | None = None  # config.toml of the whole machine
    user: Path | None = None  # the user's folder, with config.toml and profiles/*.toml
    cwd: Path | None = None  # the project file is searched from here upwards
    home: Path | None = None  # shown as ~, and the end of the search
    config: Path | None = None  # --config FILE: above the project file
    environ: Mapping[str, str] = field(default_factory=dict)

    def shown(self, path: Path) -> str:
        """The path as messages print it."""
        if self.home is not None and path.is_relative_to(self.home):
            return f"~/{path.relative_to(self.home).as_posix()}"
        return str(path)

    def project(self) -> Path | None:
        """The nearest project file, in the repository of `cwd` or else below home.

        Outside both, only `cwd` itself is searched, because anybody may write to /tmp.
        """
        if self.cwd is None:
            return None
        folders = [self.cwd, *self.cwd.parents]
        ends = [f for f in folders if exists(f / ".git")] or [f for f in folders if f == self.home] or [self.cwd]
        reach = folders[: folders.index(ends[0]) + 1]
        return next((f / PROJECT_FILE for f in reach if exists(f / PROJECT_FILE)), None)


@dataclass(frozen=True)
class ConfigFile:
    """A config file. `profile` is its name if the whole file is a profile."""

    document: Document
    profile: str = ""

    @property
    def level(self) -> Level:
        return self.document.level


def read_files(sources: Sources) -> list[ConfigFile]:
    """Read all files that exist, lowest precedence first."""
    found = builtin_files()
    if sources.system is not None and exists(sources.system):
        found.append(ConfigFile(read_document(sources.system, sources.shown(sources.system), "system")))
    if sources.user is not None:
        found += _user_files(sources, sources.user)
    project = sources.project()
    if project is not None:
        found.append(ConfigFile(read_document(project, sources.shown(project), "project")))
    if sources.config is not None:  # named explicitly, so it has to exist
        found.append(read_any_file(sources.config, sources.shown(sources.config)))
    return found


def builtin_files() -> list[ConfigFile]:
    """The shipped profiles, one file each."""
    folder = files("kvcli") / "profiles"
    shipped = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    names = [f.name.removesuffix(".toml") for f in shipped]
    return [
        ConfigFile(decode_document(f.read_bytes(), f"built-in {name}", "built-in"), name)
        for f, name in zip(shipped, names, strict=True)
    ]


def _user_files(sources: Sources, folder: Path) -> list[ConfigFile]:
    found = []
    config = folder / "config.toml"
    if exists(config):
        found.append(ConfigFile(read_document(config, sources.shown(config))))
    for path in sorted((folder / "profiles").glob("*.toml")):
        found.append(ConfigFile(read_document(path, sources.shown(path)), path.stem))
    return found


def read_any_file(path: Path, shown: str) -> ConfigFile:
    """Read a file given by name: a config file, or one profile if its keys are those of a profile."""
    document = read_document(path, shown, "--config")
    is_config = not document.values or CONFIG_KEYS & set(document.values)
    return ConfigFile(document, "" if is_config else path.stem)


CONFIG_KEYS = {"default_model", "default_profile", "keep_chats", "prefix_cache_size", "models", "profiles"}


def from_environ(environ: Mapping[str, str]) -> Settings:
    """Settings of the environment: `KVCLI_SPEC__MAX=6` sets spec.max. Ignores names without `__` and empty values."""
    found: Settings = {}
    for name in sorted(environ):
        if name.startswith(PREFIX) and "__" in name and environ[name]:
            keys = tuple(name.removeprefix(PREFIX).lower().split("__"))
            text = f"{name}={environ[name]}"
            found |= _typed(f"env {name}", text, keys, typed_value(environ[name]), len(name) + 2)
    return found


def from_sets(sets: Sequence[str]) -> tuple[Settings, list[Problem]]:
    """Settings of `--set KEY=VALUE`; later ones override earlier ones."""
    found: Settings = {}
    problems = []
    for text in sets:
        key, equals, value = text.partition("=")
        keys = tuple(part.strip() for part in key.split("."))
        if not equals or not all(re.fullmatch(r"[A-Za-z0-9_-]+", part) for part in keys):
            place = SourcePosition("--set", text or '""', is_file=False)
            problems.append(Problem(place, "not KEY=VALUE", hint="write it like --set sample.temperature=0.7"))
            continue
        found |= _typed("--set", text, keys, typed_value(value.strip()), len(key) + 2)
    return found, problems


def typed_value(text: str) -> object:
    """Parse a TOML value; other text is returned as it is: `load.device=cpu` needs no quotes."""
    try:
        read = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return read["value"] if len(read) == 1 else text


def set_value(value: object) -> str:
    """Format a value for `--set`: text without quotes."""
    return value if isinstance(value, str) else toml_value(value)


def from_flags(flags: Mapping[str, tuple[object, str]]) -> Settings:
    """Settings of dedicated flags: dotted key -> (value, the flag's name). None means that the flag was not given."""
    found: Settings = {}
    for key, (value, flag) in flags.items():
        if value is not None:
            found |= _typed(flag, f"{flag} {toml_value(value)}", tuple(key.split(".")), value, len(flag) + 2)
    return found


def from_arguments(tables: Mapping[str, object], name: str) -> Settings:
    """Settings of the Python API, nested or by dotted keys; `name` is the called function."""
    found: Settings = {}
    for keys, value in leaves(tables):
        key = ".".join(keys)
        found |= _typed(name, f"{key} = {toml_value(value)}", tuple(key.split(".")), value, len(key) + 4)
    return found


def _typed(name: str, text: str, keys: Keys, value: object, column: int) -> Settings:
    return {path: Setting(inner, Typed(name, path, text, column)) for path, inner in leaves(value, keys)}
