"""Resolution of layered settings to checked values: inheritance of profiles, precedence of layers, and problems."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcli.errors import KvcliError
from kvcli.settings.config import Config
from kvcli.settings.problems import Problem, any_of, did_you_mean
from kvcli.settings.renamed import new_name
from kvcli.settings.schema import METHOD_TABLES, ORDER, TABLES, Header, Registries, foreign
from kvcli.settings.small_file import Keys, toml_value
from kvcli.settings.values import DEFAULT, Setting, Settings, WrongSetting, checked, keys_of, merge, noun

DEEPEST = 8  # profiles below the chosen one
# key of other programs -> key of kvcli
ELSEWHERE = {
    **dict.fromkeys(["max_tokens", "num_predict", "n_predict", "max_length", "max_output_tokens"], "max_new_tokens"),
    **dict.fromkeys(["num_ctx", "n_ctx", "max_context", "context_length"], "limit"),
    "repeat_penalty": "repetition_penalty",
    "temp": "temperature",
    "typical": "typical_p",
    "top_nsigma": "top_n_sigma",
    "dry_penalty_last_n": "dry_range",
    **dict.fromkeys(["stop_sequences", "stop_strings"], "stop"),
}


@dataclass(frozen=True)
class Resolved:
    """Checked values by table, and the settings that won. With problems, only the settings of the header are valid."""

    settings: Settings
    tables: Mapping[str, Any]  # table -> instance of its dataclass; tables of methods are missing if there are problems
    problems: Sequence[Problem]


def lineage(name: str, config: Config) -> tuple[list[str], list[Problem]]:
    """The profile and all profiles it extends, lowest first, each once."""
    order: list[str] = []
    problems: list[Problem] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        extends = config.profiles[name].get(("extends",))
        for base in extended_names(extends):
            assert extends is not None
            chain = " -> ".join((*above, name, base))
            if base not in config.profiles:
                known = did_you_mean(base, config.profiles) or f"profiles: {', '.join(sorted(config.profiles))}"
                problems.append(_at_extends(extends, f"no profile is called {toml_value(base)}", known))
            elif base in (*above, name):
                problems.append(_at_extends(extends, "profiles extend each other in a circle", chain))
            elif len(above) >= DEEPEST:
                problems.append(_at_extends(extends, f"goes more than {DEEPEST} profiles deep", chain))
            elif base not in order:
                visit(base, (*above, name))
        if name not in order:
            order.append(name)

    visit(name, ())
    return order, problems


def extended_names(extends: Setting | None) -> Sequence[str]:
    """Names in an `extends`; empty if its type is wrong, which is reported with all other values."""
    value = extends.value if extends else ()
    if isinstance(value, str):
        return [value]
    return [name for name in value if isinstance(name, str)] if isinstance(value, list | tuple) else []


def _at_extends(extends: Setting, message: str, hint: str) -> Problem:
    return extends.problem(("extends",), message, hint, of_value=True)


def resolve(layers: Iterable[Settings], registries: Registries) -> Resolved:
    """Merge the layers, lowest first, and check every value in them, overridden ones too."""
    settings: Settings = {(table, key): Setting(name, DEFAULT) for table, (key, name) in METHOD_TABLES.items()}
    problems: dict[Problem, None] = {}  # in order, each once
    broken = set[str]()  # tables with problems
    for layer in layers:
        settings = merge(settings, layer)
        for keys, setting in layer.items():
            try:
                settings[keys] = _checked(keys, setting, settings, registries)
            except WrongSetting as wrong:
                problems[wrong.problem] = None
                broken.add(keys[0])
                if keys[0] not in METHOD_TABLES:
                    del settings[keys]
    tables: dict[str, Any] = {name: schema() for name, schema in TABLES.items()}
    for table in [table for table in ORDER if table not in broken]:
        try:
            tables[table] = _built(table, settings, registries)
        except WrongSetting as wrong:
            problems[wrong.problem] = None
    return Resolved(settings, tables, list(problems))


def _checked(keys: Keys, setting: Setting, around: Settings, registries: Registries) -> Setting:
    """Return one setting as its field stores it. The keys of a method are those of the method chosen so far: if a
    higher layer chooses another one, it drops them. Raises WrongSetting."""
    table, depth = keys[0], 2 if keys[0] in ORDER else 1
    if len(keys) < depth:
        if setting.value == {}:
            return setting
        message = f"{toml_value(setting.value)} is {noun(setting.value)}"
        raise WrongSetting(setting.problem(keys, message, f"{table} is a table: write {table}.KEY", of_value=True))
    if table in METHOD_TABLES:
        selector = table, METHOD_TABLES[table].key
        chosen = around[selector]
        is_known = isinstance(chosen.value, str) and chosen.value in registries[table]
        if keys == selector and not is_known:
            near = did_you_mean(str(chosen.value), registries[table])
            hint = "; ".join(filter(None, [f"use {any_of([toml_value(name) for name in registries[table]])}", near]))
            message = f"{toml_value(chosen.value)} is not allowed"
            raise WrongSetting(chosen.problem(keys, message, hint, of_value=True))
        if keys == selector or not is_known:  # nothing is known of the keys of an unknown method
            return setting
        known = keys_of(_method(table, chosen, registries))
        if keys[1] not in known:
            raise WrongSetting(_stranger(keys, setting, chosen, list(known), registries[table]))
    else:
        known = keys_of(TABLES[table] if depth == 2 else Header)
        if keys[depth - 1] not in known or (depth == 1 and setting.origin.level == "typed" and table != "exactness"):
            whole = keys if new_name(keys) else keys[:depth]
            raise WrongSetting(unknown(whole, setting, known, dotted_keys(around, registries)))
    return checked(keys, setting, known, depth)


def unknown(keys: Keys, setting: Setting, known: Iterable[str], everywhere: Sequence[str]) -> Problem:
    """Return the problem of an unknown key, with the most similar known keys."""
    if now := new_name(keys):
        return setting.problem(keys, "unknown key", f"its name is {now} now")
    table, name = keys[0], ELSEWHERE.get(keys[-1], keys[-1])
    here = f"keys of {table}: {', '.join(known)}" if len(keys) > 1 else f"tables: {', '.join(ORDER)}"
    if setting.origin.level != "typed":
        near = did_you_mean(name, known if len(keys) > 1 else [*keys_of(Header), *ORDER])
        return setting.problem(keys, "unknown key", near or here)
    # typed keys are whole paths, so the right key in a wrong table is suggested too
    ends = [key for key in everywhere if did_you_mean(name, [key.rpartition(".")[2]])]
    near = did_you_mean(".".join([*setting.origin.keys[:-1], name]), everywhere) or (
        f"did you mean {any_of(ends)}?" if ends else ""
    )
    near = near or (did_you_mean(table, ORDER) if len(keys) == 1 else "")
    return setting.problem(keys, "unknown key", " ".join(filter(None, [near, here])))


def dotted_keys(settings: Settings, registries: Registries) -> list[str]:
    """All known keys, given the methods chosen in `settings`."""
    found = [f"{table}.{key}" for table, schema in TABLES.items() for key in keys_of(schema)]
    for table, (key, default) in METHOD_TABLES.items():
        name = settings[table, key].value if (table, key) in settings else default
        target = registries.get(table, {}).get(str(name))
        found += [f"{table}.{key}", *(f"{table}.{k}" for k in (keys_of(method_class(target)) if target else {}))]
    return ["exactness", *found]


def method_class(target: str) -> type:
    """Import the dataclass that a registry names as "module:Class"."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise TypeError(f"{target} is no dataclass")
    return found


def _method(table: str, chosen: Setting, registries: Registries) -> type:
    """Import the dataclass of the method that a setting names. Raises WrongSetting if code of another package fails."""
    target = registries[table][str(chosen.value)]
    try:
        return method_class(target)
    except Exception as error:  # a method of another package may raise anything
        if (package := foreign().get(target)) is None:
            raise
        message = f"{toml_value(chosen.value)} of {package} cannot be loaded: {error or type(error).__name__}"
        hint, keys = f"pip uninstall {package.split()[0]}", (table, METHOD_TABLES[table].key)
        raise WrongSetting(chosen.problem(keys, message, hint, of_value=True)) from error


def _stranger(
    keys: Keys, setting: Setting, chosen: Setting, known: Sequence[str], registry: Mapping[str, str]
) -> Problem:
    """Return the problem of a key that the chosen method does not have; another method may have it."""
    table, (discriminator, _) = keys[0], METHOD_TABLES[keys[0]]
    # code of other packages is not run
    ours = {name: target for name, target in registry.items() if target not in foreign()}
    owners = [name for name, target in ours.items() if keys[1] in keys_of(method_class(target))]
    if owners:
        why = f"a key of {table}.{discriminator} = {any_of([toml_value(n) for n in owners])}"
        return setting.problem(keys[:2], "unknown key", f"{why}, but {toml_value(chosen.value)} is chosen")
    everywhere = [f"{table}.{name}" for name in (discriminator, *known)]
    return unknown(keys[:2], setting, [discriminator, *known], everywhere)


def _built(table: str, settings: Settings, registries: Registries) -> object:
    """Build the dataclass of a table. An error of its own checks becomes a problem at the key that the error names."""
    key = METHOD_TABLES[table].key if table in METHOD_TABLES else ""
    schema = _method(table, settings[table, key], registries) if key else TABLES[table]
    mine = {keys[1]: setting.value for keys, setting in settings.items() if keys[0] == table and len(keys) > 1}
    values = {name: value for name, value in mine.items() if name != key}
    try:
        return schema(**values)
    except (ValueError, TypeError, KvcliError) as error:
        named = [word for word in str(error).replace(",", " ").split() if word in values]
        keys = (table, named[0] if named else key)
        raise WrongSetting(settings[keys].problem(keys, str(error), of_value=True)) from error
