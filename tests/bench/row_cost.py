"""What further rows of a pass cost, by model and context: where a pass stops waiting for memory.

    python tests/bench/row_cost.py [--contexts 512,4096] [--reps 9] [--out FILE]

The demo model and a random Llama of 152M parameters. Passes of 1 to 64 rows take turns over the same stored tokens;
times are in passes of one row, medians with their range. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

import kvcli
from kvcli.calibrate.passes import cache_of_length, once
from tests.bench.decode import build, ours_of
from tests.bench.harness import machine, spread

ROWS = (1, 2, 4, 8, 16, 32, 64)


def measure(name: str, lm: Any, context: int, reps: int) -> dict[str, Any]:
    kv = cache_of_length(lm, context)
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for rep in range(reps + 2):
        for rows in ROWS:
            took = once(lm, kv, rows, context)
            if rep > 1:
                times[rows].append(took)
    ratios = {n: [t / one for t, one in zip(times[n], times[1], strict=True)] for n in ROWS[1:]}
    return {
        "model": name,
        "context": context,
        "ms of one row": spread([1000 * t for t in times[1]]),
        **{f"{n} rows": spread(ratio) for n, ratio in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="512,4096")
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    before, rows = machine(), []
    models = {"demo": kvcli.load("demo", profile="exact").lm, "random 152M": ours_of(build())}
    with torch.inference_mode():
        for name, lm in models.items():
            for context in map(int, args.contexts.split(",")):
                rows.append(measure(name, lm, context, args.reps))
                print(json.dumps(rows[-1]), flush=True)
    about = ", ".join(f"{key} {value}" for key, value in before.items())
    title, command = "Passes of many rows, in passes of one", "python tests/bench/row_cost.py"
    result = {"title": title, "machine": about, "command": command, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
