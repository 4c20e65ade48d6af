"""Settings: values with their origin, and the merging of two layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvcli.settings.problems import Problem, SourcePosition
from kvcli.settings.schema import METHOD_TABLES
from kvcli.settings.toml_positions import Document, Keys


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
