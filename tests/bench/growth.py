"""How pass times grow with the context: one row, guesses, scouts over everything (Lookahead), over a view (FAFO).

    python tests/bench/growth.py [--contexts 1024,4096,16384] [--reps 9] [--out FILE]

The random 152M Llama with a fixed frame: 8 guesses and 15 scouts (window 4, 5-grams) in every pass that has any, a view
of 16 + 496 tokens. The sides take turns on the same past. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.assemble import view as view_of
from kvcli.calibrate.passes import cache_of_length
from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.rows import Draft, Rows
from kvcli.methods.drafts.lookahead import Lookahead
from tests.bench.decode import build, machine, ours_of, spread

GUESSES = 8


def frame(config: Lookahead, context: int, *, guesses: int, scouts: bool) -> Rows:
    window, _ = config.scouting(())
    window.start(list(range(100)))
    draft = Draft(list(range(guesses)), list(range(-1, guesses - 1)), window.scouts() if scouts else None)
    return Rows.build(7, context, draft)


def measure(lm: Any, context: int, reps: int) -> dict[str, Any]:
    kv = cache_of_length(lm, context)
    lookahead, fafo = Lookahead(ngram=5), Lookahead(ngram=5, view="stream")
    view = view_of(lm, kv, fafo.drafter())
    sides = {
        "plain": (frame(lookahead, context, guesses=0, scouts=False), None),
        "guesses": (frame(lookahead, context, guesses=GUESSES, scouts=False), None),
        "lookahead": (frame(lookahead, context, guesses=GUESSES, scouts=True), None),
        "fafo": (frame(fafo, context, guesses=GUESSES, scouts=True), view),
    }
    assert view is not None
    seconds: dict[str, list[float]] = {name: [] for name in (*sides, "fafo_choosing")}
    for rep in range(reps + 2):
        for name, (rows, reads) in sides.items():
            began = time.perf_counter()
            run([ForwardRequest(lm, rows, kv, reads, rows.want)])
            if rep > 1:
                seconds[name].append(time.perf_counter() - began)
        rows, fresh = sides["fafo"][0], view.rebind(kv)  # chosen anew, as every `refresh` tokens
        began = time.perf_counter()
        run([ForwardRequest(lm, rows, kv, fresh, rows.want)])
        if rep > 1:
            seconds["fafo_choosing"].append(time.perf_counter() - began)
    scouts = sides["fafo"][0].n_rows - sides["fafo"][0].tree
    each = {
        name: spread([1000 * (a - b) / scouts for a, b in zip(seconds[name], seconds["guesses"], strict=True)])
        for name in ("lookahead", "fafo")
    }
    return {
        "context": context,
        **{f"{name}_ms": round(1000 * median(times), 2) for name, times in seconds.items()},
        "choosing_ms_per_token": spread(
            [1000 * (a - b) / fafo.refresh for a, b in zip(seconds["fafo_choosing"], seconds["fafo"], strict=True)]
        ),
        "lookahead_ms_per_scout": each["lookahead"],
        "fafo_ms_per_scout": each["fafo"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="1024,4096,16384")
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    before, lm, rows = machine(), ours_of(build()), []
    with torch.inference_mode():
        for context in map(int, args.contexts.split(",")):
            rows.append(measure(lm, context, args.reps))
            print(json.dumps(rows[-1]), flush=True)
    result = {"schema": "kvcli.bench.growth/1", "environment": before, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
