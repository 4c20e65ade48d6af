"""How a side is made, as plain data: so that another process can make the same one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvcli.profile import Profile


@dataclass(frozen=True, slots=True)
class Recipe:
    """One side. For a baseline, `settings` are those of the first profile: what it has to be like."""

    name: str
    kind: str  # "profile" or a baseline of `makers.py`
    model: str  # folder of the files
    settings: Mapping[str, Any]  # dotted keys, as in `Profile.values`
    profile: str  # name
    cache: str  # folder for what a baseline converts or installs once

    @classmethod
    def of(cls, name: str, profile: Profile, model: str, cache: str, kind: str = "profile") -> Recipe:
        return cls(name, kind, model, dict(profile.values), profile.name, cache)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"settings": dict(self.settings)}

    def as_profile(self) -> Profile:
        """The profile of the settings, however it was put together."""
        tables: dict[str, Any] = {}
        for key, value in self.settings.items():
            table, _, name = key.partition(".")
            if value is None:
                continue
            if name:
                tables.setdefault(table, {})[name] = value
            else:
                tables[table] = value
        built: Profile = Profile.load("exact").replace(**tables, name=self.profile)
        return built
