"""What further rows of a pass cost, by model and context: where a pass stops waiting for memory.

    python tests/bench/row_cost.py [--contexts 512,4096] [--reps 9] [--out FILE]

The demo model and a random Llama of 152M parameters. Passes of 1 to 64 rows take turns over the same stored tokens;
times are in passes of one row, medians with their range.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import kvcli
from kvcli.calibrate.passes import cache_of_length, once
from tests.bench.harness import Ints, Rows, in_turns, measurement, quotients, ran, spread
from tests.bench.random_model import build, ours_of

ROWS = (1, 2, 4, 8, 16, 32, 64)


def measure(name: str, lm: Any, context: int, reps: int) -> dict[str, Any]:
    kv = cache_of_length(lm, context)
    times = in_turns({rows: partial(once, lm, kv, rows, context) for rows in ROWS}, reps, 2)
    return {
        "model": name,
        "context": context,
        "ms of one row": spread([1000 * t for t in times[1]]),
        **{f"{n} rows": quotients(times[n], times[1]) for n in ROWS[1:]},
    }


@measurement("Passes of many rows, in passes of one")
def row_cost(contexts: Ints = (512, 4096), reps: int = 9) -> Rows:
    models = {"demo": ran(kvcli.load("demo", profile="exact").lm), "random 152M": ours_of(build())}
    with torch.inference_mode():
        for name, lm in models.items():
            for context in contexts:
                yield measure(name, lm, context, reps)


if __name__ == "__main__":
    row_cost.main()
