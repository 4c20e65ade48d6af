"""`kvcli bench` with the baselines of a checkout: kvpress, and llama.cpp on models that are no GGUF files.

    python tests/recipes/bench.py MODEL --baseline kvpress[:PRESS[:RATIO]] --baseline llama.cpp [OPTIONS of kvcli bench]

kvpress runs in an environment of its own, which `python tests/recipes/kvpress_environment.py` makes. For llama.cpp the
weights are exported to GGUF once. Neither is part of an installation.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli import cli
from kvcli.bench import peak, side_factory
from kvcli.bench.profile_side import Models
from kvcli.bench.side_factory import Baseline, Recipe, dtype_of, llama_cpp, require_llama_cpp
from tests.recipes.gguf_export import export
from tests.recipes.kvpress import KvPress
from tests.recipes.kvpress_environment import interpreter
from tests.recipes.kvpress_press import Press


def kvpress(recipe: Recipe, models: Models) -> KvPress:
    from kvcli.engine.loading import weights
    from kvcli.models.gguf.convert import convert_if_needed

    profile = recipe.as_profile()
    python, device = interpreter(Path(recipe.cache)), str(weights.find_device(profile.load.device))
    model = convert_if_needed(recipe.found, profile.load.dtype, Path(recipe.cache), keeps_on="").path
    return KvPress(recipe.name, model, dtype_of(recipe), models.threads(profile), python, device=device)


def require_kvpress(name: str, cache: Path) -> None:
    Press.of(name)
    interpreter(cache)


BASELINES = {
    "llama.cpp": Baseline(partial(llama_cpp, to_gguf=export), require_llama_cpp),
    "kvpress": Baseline(kvpress, require_kvpress, has_choices=True, draws=False),
}
PEAK = "peak-of-a-side"  # the argument by which this program measures memory in a process of its own


def main() -> None:
    side_factory.BASELINES |= BASELINES
    peak.COMMAND = [sys.executable, __file__, PEAK]
    if sys.argv[1:] == [PEAK]:
        peak.main()
    else:
        sys.argv.insert(1, "bench")
        cli.main()


if __name__ == "__main__":
    main()
