"""Peak memory by a process of its own."""

from __future__ import annotations

import os

import pytest

from kvcli.bench.peak import peak_of
from kvcli.bench.side_factory import Recipe
from kvcli.demo import weights_dir
from kvcli.errors import KvcliError
from kvcli.settings.profile import Profile

pytestmark = pytest.mark.skipif(
    not (weights_dir() / "model.safetensors").exists(), reason="the demo model is not in this checkout"
)


def recipe(model: str = "demo", profile: str = "ngram") -> Recipe:
    return Recipe.of(profile, Profile.load(profile), model, "")


def test_a_recipe_makes_the_same_profile_again():
    for name in ("exact", "ngram", "streaming"):
        profile = Profile.load(name).replace(load={"dtype": "fp32"}, name=name)
        again = Recipe(**Recipe.of(name, profile, "", "").as_json()).as_profile()
        assert (again.name, again.hash) == (name, profile.hash)


def test_peak_is_of_a_process_that_loaded_the_weights():
    weights = (weights_dir() / "model.safetensors").stat().st_size
    assert peak_of(recipe(), range(8, 48), 3, os.environ) > 50 << 20 > weights


def test_what_went_wrong_there_is_told_here():
    with pytest.raises(KvcliError, match="nowhere") as found:
        peak_of(recipe("nowhere/none"), range(8, 48), 3, os.environ)
    assert found.value.code == "no_peak"
