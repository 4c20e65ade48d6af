"""Recipes of sides as plain data, so that another process can make the same side, and the factory of sides.

A side is a profile or a baseline by name. A baseline is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.models import source
from kvcli.models.source import Source
from kvcli.settings.profile import Profile
from kvcli.settings.schema import NO_PENALTY

if TYPE_CHECKING:
    from kvcli.bench.profile_side import Models
    from kvcli.bench.side import Side


# Sampling settings that a benchmark sets for every side, whatever the profile says, beside temperature and seed.
UNCUT = {
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0, "xtc_probability": 0.0,
    "bregman_lambda": 0.0, "logit_bias": (), "stop": (), **NO_PENALTY,
}  # fmt: skip


def drawing(profile: Profile, temperature: float = 0.0, seed: int = 0) -> Profile:
    """Return the profile with the benchmark's sampling settings; temperature 0 is greedy."""
    sample = {**UNCUT, "temperature": temperature, "seed": seed}
    return profile.replace(sample=sample, name=profile.name, description=profile.description)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe of one side. For a baseline, `settings` are those of the first profile, which it should match."""

    name: str
    kind: str  # "profile" or one of BASELINES
    model: str  # folder of the files
    settings: Mapping[str, Any]  # dotted keys, as in `Profile.values`
    profile: str  # name
    cache: str  # folder for files that a baseline converts or installs once
    batch: int = 1  # texts side by side, of a profile

    @classmethod
    def of(cls, name: str, profile: Profile, model: str, cache: str, kind: str = "profile", batch: int = 1) -> Recipe:
        return cls(name, kind, model, dict(profile.values), profile.name, cache, batch)

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


@dataclass(frozen=True, slots=True)
class Baseline:
    """Factory of a side that is no profile, and a check that runs before anything is loaded."""

    make: Callable[[Recipe, Models], Side]
    # arguments: the name as typed, and the folder for files installed or converted once
    require: Callable[[str, Path], object] = lambda name, cache: None
    has_choices: bool = False  # after a colon: `NAME:CHOICE`
    draws: bool = True  # samples at any temperature; else it is greedy


def baseline_of(name: str) -> str | None:
    """The baseline of a name as typed; None if there is none."""
    kind, colon, _ = name.partition(":")
    return kind if kind in BASELINES and (not colon or BASELINES[kind].has_choices) else None


def make(recipe: Recipe, models: Models) -> Side:
    """Make a side, loading its weights if they are not loaded yet."""
    if recipe.kind != "profile":
        return BASELINES[recipe.kind].make(recipe, models)
    from kvcli.bench.profile_side import ProfileSide

    profile = recipe.as_profile()
    return ProfileSide(recipe.name, models.under(profile), models.threads(profile), batch=recipe.batch)


def _hf(recipe: Recipe, models: Models, lookup: int = 0) -> Side:
    from kvcli.bench.hf import HfSide, load_hf

    profile = recipe.as_profile()
    model = models.shared(("hf", profile.load), lambda: load_hf(recipe.found, profile, Path(recipe.cache)))
    return HfSide(recipe.name, model, models.threads(profile), lookup=lookup, **_drawn(profile))


def _hf_lookup(recipe: Recipe, models: Models) -> Side:
    from kvcli.bench.hf import LOOKUP

    return _hf(recipe, models, LOOKUP)


def llama_cpp(recipe: Recipe, models: Models, **more: Any) -> Side:
    from kvcli.bench.llama_cpp import LlamaCpp
    from kvcli.engine.loading import weights

    profile = recipe.as_profile()
    device = str(weights.find_device(profile.load.device))
    threads, cache = models.threads(profile), Path(recipe.cache)
    return LlamaCpp(recipe.found, dtype_of(recipe), threads, cache, device=device, **_drawn(profile), **more)


def require_llama_cpp(name: str, cache: Path) -> None:
    from kvcli.bench.llama_cpp import require

    require()


def _drawn(profile: Profile) -> dict[str, Any]:
    return {"temperature": profile.sample.temperature or 0.0, "seed": profile.sample.seed}


def dtype_of(recipe: Recipe) -> str:
    """Dtype that the profiles compute in, by torch's name."""
    from kvcli.fit.plan import subject_of, torch_dtype

    return torch_dtype(subject_of(recipe.found), recipe.as_profile())


BASELINES: dict[str, Baseline] = {  # tests/recipes/bench.py adds those of a checkout
    "hf": Baseline(_hf),
    "hf-lookup": Baseline(_hf_lookup),
    "llama.cpp": Baseline(llama_cpp, require_llama_cpp),
}
