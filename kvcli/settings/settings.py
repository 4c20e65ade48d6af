"""A setting: one value and where it was written; and how settings of two layers merge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvcli.settings.problems import Problem, SourcePosition
from kvcli.settings.schema import METHODS
from kvcli.settings.toml_positions import Document, Keys


class Origin(Protocol):
    """Where a setting was written."""

    @property
    def keys(self) -> Keys:
        """The key, in its table."""

    @property
    def name(self) -> str:
        """As `profiles show --origin` prints it."""

    def dotted(self, keys: Keys) -> str:
        """The key as it is written there."""

    def key_place(self, keys: Keys) -> SourcePosition: ...

    def value_place(self, keys: Keys) -> SourcePosition: ...


@dataclass(frozen=True)
class InFile:
    """A key of a file; `base` is the table that a profile's own keys stand in, and `keys` the key in it."""

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
    """Something typed: `--set`, an environment variable, a flag, an argument of the Python API."""

    name: str
    keys: Keys = ()
    text: str = ""  # what was typed
    value_column: int = 1

    def dotted(self, keys: Keys) -> str:
        return ".".join(keys)

    def key_place(self, keys: Keys) -> SourcePosition:
        return SourcePosition(self.name, self.text, is_file=False)

    def value_place(self, keys: Keys) -> SourcePosition:
        return SourcePosition(self.name, self.text, column=self.value_column, is_file=False)


DEFAULT = Typed("default")
BY = "what fits"  # the name of an origin: where nobody said it, and a plan of memory did


@dataclass(frozen=True)
class Setting:
    """One value, and where it was written."""

    value: object
    origin: Origin

    def problem(self, keys: Keys, message: str, hint: str = "", *, of_value: bool = False) -> Problem:
        """Something wrong with it, shown where its key stands, or its value."""
        place = self.origin.value_place(keys) if of_value else self.origin.key_place(keys)
        return Problem(place, message, self.origin.dotted(keys), hint)

    @property
    def is_shipped(self) -> bool:
        """Whether a profile of this program says it."""
        return isinstance(self.origin, InFile) and self.origin.document.level == "built-in"

    @property
    def by_project(self) -> bool:
        """Whether the project file wrote it: that may be somebody else's repository."""
        return isinstance(self.origin, InFile) and self.origin.document.level == "project"


Settings = dict[Keys, Setting]


def merge(lower: Settings, higher: Settings) -> Settings:
    """Key by key. Where the higher one names another method, the keys of the lower one's method go with it."""
    changed = {
        table
        for table, (key, _) in METHODS.items()
        if (table, key) in lower and (table, key) in higher and lower[table, key].value != higher[table, key].value
    }
    return {keys: setting for keys, setting in lower.items() if keys[0] not in changed} | higher


def flatten(document: Document, base: Keys = ()) -> Settings:
    """The leaves of the table at `base`. An empty table counts as a leaf, so that a wrong name does not hide."""
    table: object = document.values
    for name in base:
        table = table[name] if isinstance(table, Mapping) else {}
    return {keys: Setting(value, InFile(document, base, keys)) for keys, value in leaves(table)}


def leaves(table: object, above: Keys = ()) -> Iterable[tuple[Keys, object]]:
    """(path, value) of everything below a table that is no filled table itself."""
    if isinstance(table, Mapping) and (table or not above):
        for name, value in table.items():
            if isinstance(value, Mapping) and value:
                yield from leaves(value, (*above, name))
            else:
                yield (*above, name), value
    else:
        yield above, table
