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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Protocol

from kvcli.settings.problems import Problem, SourcePosition, any_of, did_you_mean
from kvcli.settings.schema import METHOD_TABLES, Pattern, Range
from kvcli.settings.small_file import Document, Keys, toml_value


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
            f.name,
            _hint(table, f.name),
            f.default if f.default_factory is dataclasses.MISSING else f.default_factory(),
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
    """Return the value as its field stores it (a list becomes a tuple). Raises WrongValue."""
    parts, markers = _unpacked(hint)
    for part in parts:
        base, own = _base(part)
        try:
            taken = _validator(base).validate_python(_frozen(value), strict=True)
        except ValueError:  # pydantic's ValidationError is one
            continue
        if all(_allows(marker, taken) for marker in (*markers, *own)):
            return taken
    raise _wrong(hint, value)


@cache
def _validator(hint: Any) -> Any:
    """Validator of a type, like pydantic's TypeAdapter.

    For the types of TOML values it is built from pydantic's core, because importing all of pydantic takes 0.1 s, half
    of the time that reading a profile may take.
    """
    from pydantic_core import SchemaValidator

    if hint in _CORE:
        return SchemaValidator({"type": _CORE[hint]})
    if typing.get_origin(hint) is Literal:
        return SchemaValidator({"type": "literal", "expected": list(typing.get_args(hint))})
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


_CORE = {bool: "bool", int: "int", float: "float", str: "str"}


def _frozen(value: object) -> object:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def _allows(marker: object, value: object) -> bool:
    if isinstance(marker, Range):
        return isinstance(value, int | float) and marker.allows(value)
    if isinstance(marker, Pattern):
        if isinstance(value, tuple):
            return all(_allows(marker, item) for item in value)
        return isinstance(value, str) and re.fullmatch(marker.pattern, value) is not None
    return True


def _base(hint: object) -> tuple[object, tuple[object, ...]]:
    if typing.get_origin(hint) is Annotated:
        base, *markers = typing.get_args(hint)
        return base, tuple(markers)
    return hint, ()


def _unpacked(hint: object) -> tuple[list[object], tuple[object, ...]]:
    """The alternatives of a type, without None (TOML has none), and the markers around them all."""
    base, markers = _base(hint)
    if typing.get_origin(base) in (typing.Union, types.UnionType):
        return [part for part in typing.get_args(base) if part is not type(None)], markers
    return [base], markers


def expected(hint: object) -> str:
    """Describe the values that a key allows: `"auto" or a whole number from 1`."""
    parts, markers = _unpacked(hint)
    return any_of([_expected_one(part, markers) for part in parts])


def _expected_one(hint: object, around: tuple[object, ...]) -> str:
    base, own = _base(hint)
    for marker in (*own, *around):
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
    parts, markers = _unpacked(hint)
    use = f"use {expected(hint)}"
    markers = (*markers, *(marker for part in parts for marker in _base(part)[1]))
    kinds = {_kind(part) for part in parts}
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        return WrongValue(f"{toml_value(value)} is {noun(value)}", use)
    near = did_you_mean(value, words(hint)) if isinstance(value, str) else ""
    return WrongValue(f"{toml_value(value)} is not allowed", "; ".join(filter(None, [use, near])))


def words(hint: object) -> list[str]:
    """Allowed words of a type with literals."""
    literals = [_base(part)[0] for part in _unpacked(hint)[0] if typing.get_origin(_base(part)[0]) is Literal]
    return [str(word) for literal in literals for word in typing.get_args(literal)]


def _kind(hint: object) -> object:
    base, _ = _base(hint)
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


class Origin(Protocol):
    """Origin of a setting."""

    @property
    def keys(self) -> Keys:
        """The key, in its table."""

    @property
    def name(self) -> str:
        """Name that `profiles show --origin` prints."""

    def dotted(self, keys: Keys) -> str:
        """The key as written at the origin."""

    def key_place(self, keys: Keys) -> SourcePosition: ...

    def value_place(self, keys: Keys) -> SourcePosition: ...


@dataclass(frozen=True)
class InFile:
    """A key of a file. `base` is the table that a profile's own keys are in, and `keys` the key in it."""

    document: Document
    base: Keys
    keys: Keys

    @property
    def name(self) -> str:
        line = self.document.key_place(self.base + self.keys).line
        return self.document.source if self.document.level == "built-in" else f"{self.document.source}:{line}"

    def dotted(self, keys: Keys) -> str:
        return ".".join(self.base + keys)

    def key_place(self, keys: Keys) -> SourcePosition:
        return self.document.key_place(self.base + keys)

    def value_place(self, keys: Keys) -> SourcePosition:
        return self.document.value_place(self.base + keys)


@dataclass(frozen=True)
class Typed:
    """Typed text: `--set`, an environment variable, a flag, an argument of the Python API."""

    name: str
    keys: Keys = ()
    text: str = ""  # the typed text
    value_column: int = 1

    def dotted(self, keys: Keys) -> str:
        return ".".join(keys)

    def key_place(self, keys: Keys) -> SourcePosition:
        return SourcePosition(self.name, self.text, is_file=False)

    def value_place(self, keys: Keys) -> SourcePosition:
        return SourcePosition(self.name, self.text, column=self.value_column, is_file=False)


DEFAULT = Typed("default")
BY = "what fits"  # name of an origin: a default that memory planning chose


@dataclass(frozen=True)
class Setting:
    """A value and its origin."""

    value: object
    origin: Origin

    def problem(self, keys: Keys, message: str, hint: str = "", *, of_value: bool = False) -> Problem:
        """Return a problem of the setting, positioned at its key or its value."""
        place = self.origin.value_place(keys) if of_value else self.origin.key_place(keys)
        return Problem(place, message, self.origin.dotted(keys), hint)

    @property
    def is_shipped(self) -> bool:
        """True if a shipped profile set the value."""
        return isinstance(self.origin, InFile) and self.origin.document.level == "built-in"

    @property
    def by_project(self) -> bool:
        """True if the project file set the value: that file may be from somebody else's repository."""
        return isinstance(self.origin, InFile) and self.origin.document.level == "project"


Settings = dict[Keys, Setting]


def merge(lower: Settings, higher: Settings) -> Settings:
    """Merge two layers key by key. If the higher one selects another method, the lower method's keys are dropped."""
    changed = {
        table
        for table, (key, _) in METHOD_TABLES.items()
        if (table, key) in lower and (table, key) in higher and lower[table, key].value != higher[table, key].value
    }
    return {keys: setting for keys, setting in lower.items() if keys[0] not in changed} | higher


def flatten(document: Document, base: Keys = ()) -> Settings:
    """Return the leaves of the table at `base`. An empty table counts as a leaf, so that a wrong name is reported."""
    table: object = document.values
    for name in base:
        table = table[name] if isinstance(table, Mapping) else {}
    return {keys: Setting(value, InFile(document, base, keys)) for keys, value in leaves(table)}


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
