"""Peak memory of one side: the side runs once more in a separate process that loads nothing else.

`python -m kvcli.bench.peak` takes one JSON object on standard input and prints one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcli.bench.side_factory import Recipe, make
from kvcli.errors import KvcliError

COMMAND = [sys.executable, "-m", "kvcli.bench.peak"]


def peak_of(recipe: Recipe, prompt: Sequence[int], new: int, environ: Mapping[str, str]) -> int:
    """Peak memory in bytes. Raises KvcliError with the process's error message if it fails."""
    asked = {"recipe": recipe.as_json(), "prompt": list(prompt), "new": new}
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environ),
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C is handled here, and ends the process
    )
    try:
        out, err = process.communicate(json.dumps(asked))
    except BaseException:
        process.kill()
        process.wait()
        raise
    return _answer(recipe.name, process.returncode, out, err)


def _answer(name: str, status: int, out: str, err: str) -> int:
    last = out.strip().splitlines()[-1:] or [""]
    try:
        said = json.loads(last[0])
    except ValueError:
        said = {"error": (err.strip().splitlines() or [f"it ended with status {status}"])[-1]}
    if "error" in said:
        raise KvcliError(f"the memory of {name} could not be measured: {said['error']}", code="no_peak")
    return int(said["peak_bytes"])


def measure(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Make the side, run it once, and return the peak memory of the process."""
    from kvcli.bench.profile_side import Models
    from kvcli.chat.model import load
    from kvcli.engine.resources import peak_bytes

    recipe = Recipe(**asked["recipe"])
    models = Models(lambda profile: load(recipe.model, profile, offline=True, cache=Path(recipe.cache)))
    try:
        side = make(recipe, models)
        side.run(asked["prompt"], asked["new"])
    except KvcliError as error:
        return {"error": "; ".join([error.message, *error.lines])}
    except (MemoryError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    import torch

    return {"peak_bytes": side.peak_bytes or peak_bytes(torch.device(side.setup.get("device", "cpu")))}


def main() -> None:
    print(json.dumps(measure(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
