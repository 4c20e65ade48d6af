"""Recipe of a side as plain data, so that another process can make the same side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvcli.models import source
from kvcli.models.source import Source
from kvcli.settings.profile import Profile

# Sampling settings that a benchmark sets for every side, whatever the profile says, beside temperature and seed.
UNCUT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def drawing(profile: Profile, temperature: float = 0.0, seed: int = 0) -> Profile:
    """Return the profile with the benchmark's sampling settings; temperature 0 is greedy."""
    sample = {**UNCUT, "temperature": temperature, "seed": seed}
    return profile.replace(sample=sample, name=profile.name, description=profile.description)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe of one side. For a baseline, `settings` are those of the first profile, which it should match."""

    name: str
    kind: str  # "profile" or a baseline of `side_factory.py`
    model: str  # folder of the files
    settings: Mapping[str, Any]  # dotted keys, as in `Profile.values`
    profile: str  # name
    cache: str  # folder for files that a baseline converts or installs once

    @classmethod
    def of(cls, name: str, profile: Profile, model: str, cache: str, kind: str = "profile") -> Recipe:
        return cls(name, kind, model, dict(profile.values), profile.name, cache)

    @property
    def found(self) -> Source:
        """The model's checked files."""
        return source.find(self.model, offline=True, allow_pickle=bool(self.settings["load.allow_pickle"]))

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"settings": dict(self.settings)}

    def as_profile(self) -> Profile:
        """Build the profile of the settings."""
        said = {key: value for key, value in self.settings.items() if value is not None}
        built: Profile = Profile.load("exact").replace(**said, name=self.profile)
        return built
