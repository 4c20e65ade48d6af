"""Factory of sides from recipes: profiles, and the baselines by name. A baseline is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.bench.recipe import Recipe

if TYPE_CHECKING:
    from kvcli.bench.profile_side import Models
    from kvcli.bench.side import Side
    from kvcli.settings.profile import Profile


@dataclass(frozen=True, slots=True)
class Baseline:
    """Factory of a side that is no profile, and a check that runs before anything is loaded."""

    make: Callable[[Recipe, Models], Side]
    # arguments: the name as typed, and the folder for files installed or converted once
    require: Callable[[str, Path], object] = lambda name, cache: None
    has_choices: bool = False  # after a colon: `kvpress:SnapKV`
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
    return ProfileSide(recipe.name, models.under(profile), models.threads(profile))


def _hf(recipe: Recipe, models: Models, lookup: int = 0) -> Side:
    from kvcli.bench.hf import HfSide, load_hf

    profile = recipe.as_profile()
    model = models.shared(("hf", profile.load), lambda: load_hf(recipe.found, profile, Path(recipe.cache)))
    return HfSide(recipe.name, model, models.threads(profile), lookup=lookup, **_drawn(profile))


def _hf_lookup(recipe: Recipe, models: Models) -> Side:
    from kvcli.bench.hf import LOOKUP

    return _hf(recipe, models, LOOKUP)


def _llama_cpp(recipe: Recipe, models: Models) -> Side:
    from kvcli.bench.llama_cpp import LlamaCpp
    from kvcli.engine.loading import weights

    profile = recipe.as_profile()
    device = str(weights.find_device(profile.load.device))
    threads, cache = models.threads(profile), Path(recipe.cache)
    return LlamaCpp(recipe.found, _dtype(recipe), threads, cache, device=device, **_drawn(profile))


def _require_llama_cpp(name: str, cache: Path) -> None:
    from kvcli.bench.llama_cpp import require

    require()


def _kvpress(recipe: Recipe, models: Models) -> Side:
    from kvcli.bench.kvpress import KvPress
    from kvcli.bench.kvpress_environment import interpreter
    from kvcli.engine.loading import weights
    from kvcli.models.gguf.convert import convert_if_needed

    profile = recipe.as_profile()
    python, device = interpreter(Path(recipe.cache)), str(weights.find_device(profile.load.device))
    model = convert_if_needed(recipe.found, profile.load.dtype, Path(recipe.cache), packs=False).path
    return KvPress(recipe.name, model, _dtype(recipe), models.threads(profile), python, device=device)


def _require_kvpress(name: str, cache: Path) -> None:
    from kvcli.bench.kvpress_environment import interpreter
    from kvcli.bench.kvpress_press import Press

    Press.of(name)
    interpreter(cache)


def _drawn(profile: Profile) -> dict[str, Any]:
    return {"temperature": profile.sample.temperature or 0.0, "seed": profile.sample.seed}


def _dtype(recipe: Recipe) -> str:
    """Dtype that the profiles compute in, by torch's name."""
    from kvcli.fit.plan import subject_of, torch_dtype

    return torch_dtype(subject_of(recipe.found), recipe.as_profile())


BASELINES: Mapping[str, Baseline] = {
    "hf": Baseline(_hf),
    "hf-lookup": Baseline(_hf_lookup),
    "llama.cpp": Baseline(_llama_cpp, _require_llama_cpp),
    "kvpress": Baseline(_kvpress, _require_kvpress, has_choices=True, draws=False),
}
