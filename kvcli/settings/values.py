"""Type check of TOML values against dataclass fields, with a description of the allowed values."""

from __future__ import annotations

import dataclasses
import inspect
import io
import re
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal

from kvcli.settings.problems import Problem, any_of, did_you_mean
from kvcli.settings.schema import LARGEST, METHOD_TABLES, Pattern, Range
from kvcli.settings.small_file import Document, Keys, Level, toml_value


class WrongValue(ValueError):
    """Error for a value that its key does not allow: the message, and a hint what to write."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Key:
    """A field of a table."""

    name: str
    hint: object  # its type, with the markers
    default: object  # dataclasses.MISSING if the method requires the key


@cache
def keys_of(table: type) -> dict[str, Key]:
    """The keys of a table, in order: the fields that its constructor takes."""
    return {
        f.name: Key(
            f.name, _hint(table, f.name), f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        )
        for f in dataclasses.fields(table)
        if f.init
    }


def _hint(table: type, name: str) -> object:
    # by field, because a class may have state whose type it imports for the type checker only
    owner = next(c for c in table.__mro__ if name in inspect.get_annotations(c))
    written = inspect.get_annotations(owner)[name]
    holder = type("Holder", (), {"__annotations__": {name: written}, "__module__": owner.__module__})
    return typing.get_type_hints(holder, vars(sys.modules[owner.__module__]), include_extras=True)[name]


def check(hint: object, value: object) -> object:
    """Return the value as its field stores it: a list as a tuple, a whole number of a `float` field as a float.

    Raises WrongValue."""
    for base, markers in _alternatives(hint):
        if _is_of(base, value) and all(_allows(marker, value) for marker in markers):
            return float(value) if base is float else _frozen(value)  # type: ignore[arg-type]  # it is a number
    raise _wrong(hint, value)


def _is_of(base: object, value: object) -> bool:
    """True if a TOML value has this type. A whole number is a float as well, but true and false are no numbers."""
    args = typing.get_args(base)
    if typing.get_origin(base) is Literal:
        return any(value == word and type(value) is type(word) for word in args)
    if typing.get_origin(base) is tuple:
        return isinstance(value, list | tuple) and all(_is_of(args[0], item) for item in value)
    if type(value) is str:  # a shell passes on bytes that are no text
        return base is str and not SURROGATE.search(value)
    if type(value) is int and base is float:
        return abs(value) <= sys.float_info.max
    return type(value) is base


SURROGATE = re.compile("[\ud800-\udfff]")


def _frozen(value: object) -> object:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def _allows(marker: object, value: object) -> bool:
    if isinstance(marker, Range):
        return isinstance(value, int | float) and marker.allows(value)
    if isinstance(marker, Pattern):
        texts = value if isinstance(value, list | tuple) else [value]
        return all(isinstance(text, str) and re.fullmatch(marker.pattern, text) for text in texts)
    return True


@cache
def _alternatives(hint: Any) -> Sequence[tuple[object, tuple[object, ...]]]:
    """Alternatives of a type, without None (TOML has none), each with its markers and those around all of them."""
    base, *markers = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    if typing.get_origin(base) not in (typing.Union, types.UnionType):
        return [(base, tuple(markers))]
    parts = [part for part in typing.get_args(base) if part is not type(None)]
    return [(inner, (*own, *markers)) for part in parts for inner, own in _alternatives(part)]


def expected(hint: object) -> str:
    """Describe the values that a key allows: `"auto" or a whole number from 1`."""
    return any_of(list(dict.fromkeys(_expected_one(base, markers) for base, markers in _alternatives(hint))))


def _expected_one(base: object, markers: tuple[object, ...]) -> str:
    for marker in markers:
        if isinstance(marker, Pattern):
            return marker.words
        if isinstance(marker, Range) and base in (int, float):
            return f"{_NOUNS[base]} {marker.words()}"
    if typing.get_origin(base) is Literal:
        return any_of([toml_value(word) for word in typing.get_args(base)])
    if typing.get_origin(base) is tuple:
        inner = typing.get_args(base)[0]
        words = _expected_one(inner, ()) if typing.get_origin(inner) is Literal else _NOUNS.get(inner, "values")
        return f"a list of {words}"
    return _NOUNS.get(base, "another value")


_NOUNS: Mapping[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a table",
}


def noun(value: object) -> str:
    """Describe the kind of a TOML value."""
    own = {bool: "a true/false value", float: "a decimal number", type(None): "nothing"}
    return own.get(type(value)) or _NOUNS.get(type(value), "a date or time")


def _wrong(hint: object, value: object) -> WrongValue:
    use, kinds = f"use {expected(hint)}", {_kind(base) for base, _ in _alternatives(hint)}
    if type(value) is int and value > LARGEST and kinds & {int, float}:
        use += f", at most {LARGEST:,}" * (" to " not in use)
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        return WrongValue(f"{toml_value(value)} is {noun(value)}", use)
    near = did_you_mean(value, words(hint)) if isinstance(value, str) else ""
    return WrongValue(f"{toml_value(value)} is not allowed", "; ".join(filter(None, [use, near])))


def words(hint: object) -> list[str]:
    """Allowed words of a type with literals."""
    literals = [base for base, _ in _alternatives(hint) if typing.get_origin(base) is Literal]
    return [str(word) for literal in literals for word in typing.get_args(literal)]


def _kind(base: object) -> object:
    if typing.get_origin(base) is Literal:
        return type(typing.get_args(base)[0])
    return list if typing.get_origin(base) is tuple else base


@cache
def comments_of(table: type) -> dict[str, str]:
    """The comment of each field of a dataclass. Listings show these comments to users; they are written only there."""
    found: dict[str, str] = {}
    for owner in reversed(table.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        source = textwrap.dedent(inspect.getsource(owner))
        lines = source.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            field = re.match(r" +(\w+) *:", lines[token.start[0] - 1]) if token.type == tokenize.COMMENT else None
            if field:
                found[field[1]] = token.string.lstrip("# ")
    return found


# Settings: values with their origin, and the merging of two layers.


@dataclass(frozen=True)
class Origin:
    """Origin of a setting: its key in a file, or typed text (`--set`, an environment variable, a flag, an argument)."""

    document: Document
    keys: Keys = ()  # the key, in its table
    base: Keys = ()  # the table of the file that has the keys of a model or a profile

    @property
    def level(self) -> Level:
        return self.document.level

    @property
    def name(self) -> str:
        """Name that `profiles show --origin` prints."""
        source = self.document.source
        if self.level in ("built-in", "typed"):
            return source
        return f"{source}:{self.document.place_of(self.base + self.keys).line}"


BY = "what fits"  # name of an origin: a default that memory planning chose


@dataclass(frozen=True)
class Setting:
    """A value and its origin."""

    value: object
    origin: Origin
    why: str = ""  # why the model required another value than the one asked for, as a sentence for the user

    def problem(self, keys: Keys, message: str, hint: str = "", *, of_value: bool = False) -> Problem:
        """Return a problem of the setting, positioned at its key or its value."""
        written = self.origin.base + keys
        place = self.origin.document.place_of(written, of_value=of_value)
        return Problem(place, message, ".".join(written), hint)


DEFAULT = Origin(Document("default", "", {}, level="typed"))
Settings = dict[Keys, Setting]


def merge(lower: Settings, higher: Settings) -> Settings:
    """Merge two layers key by key. If the higher one selects another method, the lower method's keys are dropped."""
    changed = {
        table
        for table, (key, _) in METHOD_TABLES.items()
        if (table, key) in lower and (table, key) in higher and lower[table, key].value != higher[table, key].value
    }
    return {keys: setting for keys, setting in lower.items() if keys[0] not in changed} | higher


class WrongSetting(ValueError):
    """Error for a setting that no key allows, with its position."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def checked(keys: Keys, setting: Setting, known: Mapping[str, Key], depth: int = 1) -> Setting:
    """Return the setting with its value as the field stores it. `depth`: length of a whole key; what is below it is a
    table in place of a value. Raises WrongSetting."""
    value = setting.value if len(keys) == depth else {keys[depth]: setting.value}
    try:
        return replace(setting, value=check(known[keys[depth - 1]].hint, value))
    except WrongValue as wrong:
        problem = setting.problem(keys[:depth], wrong.message, wrong.hint, of_value=True)
        raise WrongSetting(problem) from wrong


def flatten(document: Document, base: Keys = ()) -> Settings:
    """Return the leaves of the table at `base`. An empty table counts as a leaf, so that a wrong name is reported."""
    table: object = document.values
    for name in base:
        table = table[name] if isinstance(table, Mapping) else {}
    return {keys: Setting(value, Origin(document, keys, base)) for keys, value in leaves(table)}


def leaves(table: object, above: Keys = ()) -> Iterable[tuple[Keys, object]]:
    """(path, value) of every value below a table, where a filled table is no value."""
    if isinstance(table, Mapping) and (table or not above):
        for name, value in table.items():
            if isinstance(value, Mapping) and value:
                yield from leaves(value, (*above, name))
            else:
                yield (*above, name), value
    else:
        yield above, table
