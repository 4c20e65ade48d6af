"""`python tests/recipes/bench.py`: the program itself, with the process that measures memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kvcli.bench.side_factory import Recipe
from kvcli.settings.profile import Profile
from tests.recipes import bench


def test_the_process_that_measures_memory_knows_the_baselines(tmp_path: Path):
    """kvpress's environment is missing there: that, and no unknown side, is the answer."""
    recipe = Recipe.of("kvpress", Profile.load("exact"), "demo", str(tmp_path), "kvpress")
    asked = json.dumps({"recipe": recipe.as_json(), "prompt": [8, 9], "new": 1})
    done = subprocess.run(
        [sys.executable, bench.__file__, bench.PEAK], input=asked, capture_output=True, text=True, env=os.environ
    )
    assert "a separate Python environment" in json.loads(done.stdout)["error"], done.stderr
