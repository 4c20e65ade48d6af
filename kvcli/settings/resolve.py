"""Resolution of layered settings to checked values: inheritance of profiles, precedence of layers, and problems."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcli.errors import KvcliError
from kvcli.settings.config import Config
from kvcli.settings.problems import Problem, any_of, did_you_mean
from kvcli.settings.renamed import new_name
from kvcli.settings.schema import METHOD_TABLES, ORDER, TABLES, Header, Registries, foreign
from kvcli.settings.small_file import Keys, toml_value
from kvcli.settings.values import DEFAULT, Setting, Settings, Typed, WrongValue, check, keys_of, merge, noun

DEEPEST = 8  # profiles below the chosen one
# key of other programs -> key of kvcli
ELSEWHERE = {
    **dict.fromkeys(["max_tokens", "num_predict", "n_predict", "max_length", "max_output_tokens"], "max_new_tokens"),
    **dict.fromkeys(["num_ctx", "n_ctx", "max_context", "context_length"], "limit"),
    "repeat_penalty": "repetition_penalty",
    "temp": "temperature",
}


@dataclass
class Resolved:
    """Checked values by table, and the settings that won. With problems, the values are incomplete."""

    settings: Settings = field(default_factory=dict)
    header: dict[str, object] = field(default_factory=dict)
    tables: dict[str, object] = field(default_factory=dict)  # table -> instance of its dataclass
    problems: list[Problem] = field(default_factory=list)


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
    found = Resolved({(table, key): Setting(name, DEFAULT) for table, (key, name) in METHOD_TABLES.items()})
    for layer in layers:
        found.problems += _outside_methods(layer, found.settings, registries)
        merged = merge(found.settings, layer)
        for table, (key, _) in METHOD_TABLES.items():
            # keys dropped because a higher layer selects another method are checked against the old method
            gone = {k: s for k, s in found.settings.items() if k[0] == table and k not in merged and k not in layer}
            if gone:
                gone[table, key] = found.settings[table, key]
                _method(table, gone, registries, found.problems)
        found.settings = merged
    _fill(found, registries)
    return found


def _outside_methods(layer: Settings, below: Settings, registries: Registries) -> list[Problem]:
    """Problems of one layer, except in the tables of methods, whose keys depend on the layers above."""
    problems = []
    for keys, setting in layer.items():
        if keys[0] in METHOD_TABLES and (len(keys) > 1 or setting.value == {}):
            continue
        problem = _problem(keys, setting, below | layer, registries)
        if problem is not None and problem not in problems:
            problems.append(problem)
    return problems


def _problem(keys: Keys, setting: Setting, around: Settings, registries: Registries) -> Problem | None:
    """Problem of one setting, if there is one."""
    if keys[0] in ORDER and len(keys) == 1:
        if setting.value == {}:
            return None
        message = f"{toml_value(setting.value)} is {noun(setting.value)}"
        return setting.problem(keys, message, f"{keys[0]} is a table: write {keys[0]}.KEY", of_value=True)
    known = keys_of(TABLES[keys[0]]) if keys[0] in TABLES else keys_of(Header) if keys[0] not in ORDER else {}
    depth = 2 if keys[0] in ORDER else 1
    name = keys[depth - 1]
    if name not in known or (depth == 1 and isinstance(setting.origin, Typed) and name != "exactness"):
        return unknown(keys if new_name(keys) else keys[:depth], setting, known, dotted_keys(around, registries))
    try:
        check(known[name].hint, setting.value if len(keys) == depth else {keys[depth]: setting.value})
    except WrongValue as wrong:
        return setting.problem(keys[:depth], wrong.message, wrong.hint, of_value=True)
    return None


def unknown(keys: Keys, setting: Setting, known: Iterable[str], everywhere: Sequence[str]) -> Problem:
    """Return the problem of an unknown key, with the most similar known keys."""
    if now := new_name(keys):
        return setting.problem(keys, "unknown key", f"its name is {now} now")
    table, name = keys[0], ELSEWHERE.get(keys[-1], keys[-1])
    here = f"keys of {table}: {', '.join(known)}" if len(keys) > 1 else f"tables: {', '.join(ORDER)}"
    if not isinstance(setting.origin, Typed):
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


def _fill(found: Resolved, registries: Registries) -> None:
    """Build the tables from the settings that won. Values with problems are left at their defaults."""
    for name, schema in TABLES.items():
        found.tables[name] = schema(**_values(found.settings, schema, name))
    found.header = _values(found.settings, Header)
    for name in METHOD_TABLES:
        mine = {keys: setting for keys, setting in found.settings.items() if keys[0] == name}
        method = _method(name, mine, registries, found.problems)
        if method is not None:
            found.tables[name] = method


def _values(settings: Settings, schema: type, table: str = "") -> dict[str, object]:
    values = {}
    for name, key in keys_of(schema).items():
        setting = settings.get((table, name) if table else (name,))
        if setting is not None:
            try:
                values[name] = check(key.hint, setting.value)
            except WrongValue:  # reported by the layer that has it
                continue
    return values


def _method(table: str, mine: Settings, registries: Registries, problems: list[Problem]) -> object | None:
    """Build the method's dataclass from its settings; None and problems if that fails."""
    key, _ = METHOD_TABLES[table]
    chosen = mine[table, key]
    registry = registries[table]
    if not isinstance(chosen.value, str) or chosen.value not in registry:
        near = did_you_mean(str(chosen.value), registry)
        hint = "; ".join(filter(None, [f"use {any_of([toml_value(name) for name in registry])}", near]))
        message = f"{toml_value(chosen.value)} is not allowed"
        problems.append(chosen.problem((table, key), message, hint, of_value=True))
        return None
    try:
        schema = method_class(registry[chosen.value])
    except Exception as error:  # a method of another package may raise anything
        if (package := foreign().get(registry[chosen.value])) is None:
            raise
        message = f"{toml_value(chosen.value)} of {package} cannot be loaded: {error or type(error).__name__}"
        problems.append(chosen.problem((table, key), message, f"pip uninstall {package.split()[0]}", of_value=True))
        return None
    known, values, before = keys_of(schema), {}, len(problems)
    for keys, setting in mine.items():
        if keys == (table, key) or len(keys) == 1:
            continue
        if keys[1] not in known:
            problems.append(_stranger(keys, setting, chosen, list(known), registry))
            continue
        try:
            values[keys[1]] = check(known[keys[1]].hint, setting.value if len(keys) == 2 else {keys[2]: setting.value})
        except WrongValue as wrong:
            problems.append(setting.problem(keys[:2], wrong.message, wrong.hint, of_value=True))
    return _built(schema, values, mine, table, problems) if len(problems) == before else None


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


def _built(
    schema: type, values: Mapping[str, object], mine: Settings, table: str, problems: list[Problem]
) -> object | None:
    """Build the dataclass. An error of its own checks becomes a problem at the key that the error names."""
    try:
        built: object = schema(**values)
    except (ValueError, TypeError, KvcliError) as error:
        words = str(error).replace(",", " ").split()
        named = [word for word in words if word in values]
        keys = (table, named[0]) if named else (table, METHOD_TABLES[table][0])
        problems.append(mine[keys].problem(keys, str(error), of_value=True))
        return None
    return built
