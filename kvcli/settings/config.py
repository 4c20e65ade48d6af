"""Merged config files: models, defaults and profiles by name, and all problems found in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from os.path import exists  # unlike Path.exists, False instead of an error below a folder without access
from pathlib import Path, PurePath
from typing import Any, get_args

import tomli

from kvcli.errors import BadConfig
from kvcli.settings.problems import Problem, SourcePosition, bad_config, did_you_mean
from kvcli.settings.renamed import new_name
from kvcli.settings.schema import ORDER, Header, Model, Purpose, Top, size_of
from kvcli.settings.small_file import Document, Keys, Level, decode_document, read_document, toml_value
from kvcli.settings.values import (
    Origin,
    Setting,
    Settings,
    WrongSetting,
    checked,
    flatten,
    keys_of,
    leaves,
    merge,
    noun,
)

# Sources of settings: files in order of precedence, the environment, `--set` and flags, each with its position.

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


def read_files(sources: Sources) -> list[Document]:
    """Read all files that exist, lowest precedence first."""

    def read(path: Path, level: Level) -> Document:
        return read_document(path, sources.shown(path), level)

    found = builtin_files()
    if sources.system is not None and exists(sources.system):
        found.append(read(sources.system, "system"))
    if sources.user is not None:
        if exists(config := sources.user / "config.toml"):
            found.append(read(config, "user"))
        profiles = sorted((sources.user / "profiles").glob("*.toml"))
        found += [replace(read(path, "user"), profile=path.stem) for path in profiles]
    if (project := sources.project()) is not None:
        found.append(read(project, "project"))
    if sources.config is not None:  # named explicitly, so it has to exist
        named = read(sources.config, "--config")
        is_config = not named.values or CONFIG_KEYS & set(named.values)
        found.append(named if is_config else replace(named, profile=sources.config.stem))
    return found


def builtin_files() -> list[Document]:
    """The shipped profiles, one file each."""
    shipped = sorted(
        (f for f in (files("kvcli") / "profiles").iterdir() if f.name.endswith(".toml")), key=lambda f: f.name
    )
    named = [(f.name.removesuffix(".toml"), f.read_bytes()) for f in shipped]
    return [replace(decode_document(raw, f"built-in {name}", "built-in"), profile=name) for name, raw in named]


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
    typed = Document(name, text, {}, level="typed", value_column=column)
    return {path: Setting(inner, Origin(typed, path)) for path, inner in leaves(value, keys)}


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# keys refused in a project file: a cloned repository must not decide whose code runs
REFUSED = {"trust_remote_code", "allow_pickle"}


@dataclass
class Config:
    """All config files merged, profiles not yet resolved. Made by `read_config`."""

    top: dict[str, Setting] = field(default_factory=dict)
    models: dict[str, Settings] = field(default_factory=dict)
    profiles: dict[str, Settings] = field(default_factory=dict)
    levels: dict[str, Level] = field(default_factory=dict)  # profile -> the lowest level that defines it
    problems: list[Problem] = field(default_factory=list)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record the problem of a setting, and leave the setting out."""
        try:
            yield
        except WrongSetting as wrong:
            self.problems.append(wrong.problem)

    def _stated(self, key: str) -> Any:
        """The value of a key outside of tables, or its default."""
        setting = self.top.get(key)
        return setting.value if setting else getattr(Top, key)

    @property
    def default_model(self) -> str:
        return str(self._stated("default_model"))

    @property
    def keep_chats(self) -> bool:
        return bool(self._stated("keep_chats"))

    def prefix_cache_size(self, free: int) -> int:
        """Size limit of the prefix cache in bytes; by default at most a tenth of the bytes `free` on the disk."""
        setting = self.top.get("prefix_cache_size")
        return size_of(str(setting.value)) if setting else min(size_of(Top.prefix_cache_size), free // 10)

    @property
    def default_profile(self) -> str:
        return str(self._stated("default_profile"))

    def names(self) -> list[str]:
        """All profile names, ordered by purpose and then by name; profiles of papers are last."""
        order = get_args(Purpose)

        def place(name: str) -> tuple[int, str]:
            said = self.profiles[name].get(("purpose",))
            return (order.index(said.value) if said and said.value in order else 0, name)

        return sorted(self.profiles, key=place)

    def unknown_profiles(self) -> list[Problem]:
        """Problems of profile names that are used outside profiles and that no file defines."""
        named = [self.top.get("default_profile"), *(model.get(("profile",)) for model in self.models.values())]
        known = ("", *self.profiles)
        return [
            _unknown_profile(setting, self) for setting in named if setting is not None and setting.value not in known
        ]

    def model(self, name: str | None = None) -> Model:
        """Return the model of a name. A name that no file defines is used as the path. None = the default model."""
        name = name or self.default_model
        values = {keys[0]: setting.value for keys, setting in self.models.get(name, {}).items()}
        values["path"] = values.get("path") or name
        return Model(**values)  # type: ignore[arg-type]  # each value was checked against its field

    def chosen_by_project(self, name: str | None) -> Setting | None:
        """The project file's setting that selects this model, if there is one."""
        path = self.models.get(name or self.default_model, {}).get(("path",))
        default = self.top.get("default_model") if not name and path is None else None
        return next((s for s in (path, default) if s is not None and s.origin.level == "project"), None)


def read_config(sources: Sources) -> Config:
    """Read and merge all files. Problems are collected, not raised."""
    config = Config()
    for file in read_files(sources):
        config.problems += file.problems
        if not file.profile:
            _add_config_file(config, file)
            continue
        settings = flatten(file)
        with config.noting():
            if (version := settings.pop(("schema",), None)) is not None:
                checked(("schema",), version, keys_of(Top))
        with config.noting():
            _add_profile(config, file, file.profile, settings)
    return config


def load_config(sources: Sources) -> Config:
    """Read and merge all files. Raises one BadConfig with all problems."""
    config = read_config(sources)
    if config.problems:
        raise bad_config(config.problems)
    return config


def chosen_profile(name: str | None, config: Config, environ: Mapping[str, str], model: str | None) -> str:
    """Name of the profile to use: requested, or set in the environment, for the model, or as the default."""
    asked = name or environ.get("KVCLI_PROFILE")
    if asked:
        if asked in config.profiles:
            return asked
        raise no_such_profile(asked, config, "" if name else "from KVCLI_PROFILE in the environment")
    of_model = config.models.get(model or config.default_model, {}).get(("profile",))
    setting = of_model if of_model is not None and of_model.value else config.top.get("default_profile")
    usual = str(setting.value) if setting else Top.default_profile
    if usual in config.profiles:
        return usual
    if setting is None:
        raise no_such_profile(usual, config)
    raise bad_config([_unknown_profile(setting, config)])


def _unknown_profile(setting: Setting, config: Config) -> Problem:
    name = str(setting.value)
    hint = did_you_mean(name, config.profiles) or f"profiles: {', '.join(sorted(config.profiles))}"
    return setting.problem(setting.origin.keys, f"no profile is called {toml_value(name)}", hint, of_value=True)


def no_such_profile(name: str, config: Config, whence: str = "") -> BadConfig:
    """Return the error for an unknown profile name."""
    near = did_you_mean(name, config.profiles)
    return BadConfig(
        f"no profile is called {toml_value(name)}",
        lines=[line for line in (whence, near, f"profiles: {', '.join(sorted(config.profiles))}") if line],
        detail={"profile": name, "profiles": sorted(config.profiles)},
        try_=["kvcli profiles list"],
    )


def _add_config_file(config: Config, file: Document) -> None:
    for name, value in file.values.items():
        setting = Setting(value, Origin(file, (name,)))
        with config.noting():
            if name not in ("models", "profiles"):
                config.top[name] = _taken(config, file.level, (name,), setting, Top)
                continue
            add = _add_model if name == "models" else _add_profile
            for inner, table in _table(setting, f"[{name}.NAME]").items():
                with config.noting():
                    _table(Setting(table, Origin(file, (inner,), (name,))), f"[{name}.{inner}]")
                    # an empty table flattens to itself
                    add(config, file, inner, flatten(file, (name, inner)) if table else {})


def _table(setting: Setting, header: str) -> Mapping[str, object]:
    if isinstance(setting.value, Mapping):
        return setting.value
    message = f"{toml_value(setting.value)} is {noun(setting.value)}"
    raise WrongSetting(setting.problem(setting.origin.keys, message, f"write {header}"))


def _add_model(config: Config, file: Document, name: str, settings: Settings) -> None:
    taken: Settings = {}
    for keys, setting in settings.items():
        with config.noting():
            taken[keys] = _taken(config, file.level, keys, setting, Model)
    config.models[name] = config.models.get(name, {}) | taken


def _add_profile(config: Config, file: Document, name: str, settings: Settings) -> None:
    table = () if file.profile else ("profiles", name)
    here, dotted = file.place_of(table), ".".join(table) or name
    if not NAME.fullmatch(name):
        raise WrongSetting(Problem(here, "not a profile name", dotted, "use letters, digits, dots, - and _"))
    if file.level != "built-in" and config.levels.get(name) == "built-in":
        hint = f'choose another name, and write extends = "{name}"'
        raise WrongSetting(Problem(here, f'"{name}" is built in and cannot be redefined', dotted, hint))
    taken: Settings = {}
    for keys, setting in settings.items():
        with config.noting():
            _refuse_of_project(config, file.level, keys, setting)
            taken[keys] = setting
    config.levels.setdefault(name, file.level)
    config.profiles[name] = merge(config.profiles.get(name, {}), taken)


def _refuse_of_project(config: Config, level: Level, keys: Keys, setting: Setting) -> None:
    """Refuse keys of a project file: a cloned repository must not decide whose code runs. Raises WrongSetting."""
    if level != "project":
        return
    why, base = "", setting.origin.base  # ("models", NAME), ("profiles", NAME) or ()
    names_model = keys in (("default_model",), ("spec", "model"), ("reasoning_steps", "model"))
    if keys[-1] in REFUSED or keys in (("keep_chats",), ("prefix_cache_size",)):
        why = "a project file may not set this"
    elif (names_model or (base[:1] == ("models",) and keys == ("path",))) and _is_outside(setting.value):
        why = "a project file may not name a model outside the project"
    elif base[:1] == ("models",) and keys in (("path",), ("revision",)):
        if base[1] in config.models:
            why = "a project file may not redirect a model that your own config names"
        elif "/" in base[1] or base[1] == Top.default_model:
            why = "a project file may not redirect a model id"
    if why:
        raise WrongSetting(setting.problem(keys, why, "your own config file and the command line may"))


def _is_outside(value: object) -> bool:
    """True if a model path is outside the project; ids such as Qwen/Qwen3-8B and folders inside are not."""
    path = PurePath(str(value))
    return path.is_absolute() or ".." in path.parts or str(value).startswith("~")


def _taken(config: Config, level: Level, keys: Keys, setting: Setting, table: type) -> Setting:
    """Return a setting of a flat table, checked. Raises WrongSetting."""
    known, name = keys_of(table), keys[0]
    if name not in known:
        if table is Top and (name in ORDER or name in keys_of(Header)):
            hint = f"settings belong in a profile: [profiles.NAME{'.' + name if name in ORDER else ''}]"
        elif table is Top and (now := new_name([name])):
            hint = f"its name is {now} now"
        else:
            here = sorted({*known, *CONFIG_KEYS}) if table is Top else list(known)
            hint = did_you_mean(name, here) or f"keys here: {', '.join(here)}"
        raise WrongSetting(setting.problem(keys[:1], "unknown key", hint))
    _refuse_of_project(config, level, keys, setting)
    return checked(keys, setting, known)
