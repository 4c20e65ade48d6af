"""How pass times grow with the context: one row, guesses, scouts over everything (Lookahead), over a view (FAFO).

    python tests/bench/growth.py [--contexts 1024,4096,16384] [--reps 9] [--out FILE]

The random 152M Llama with a fixed frame: 8 guesses and 15 scouts (window 4, 5-grams) in every pass that has any, a view
of 16 + 496 tokens. The sides take turns on the same past.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.assemble import view as view_of
from kvcli.calibrate.passes import cache_of_length
from kvcli.engine import rows as engine_rows
from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest
from kvcli.engine.rows import Draft
from kvcli.methods.drafts.lookahead import Lookahead
from tests.bench.harness import Ints, Rows, in_turns, measurement, seconds, spread
from tests.bench.random_model import build, ours_of

GUESSES = 8


def frame(config: Lookahead, context: int, *, guesses: int, scouts: bool) -> engine_rows.Rows:
    window, _ = config.scouting(())
    window.start(list(range(100)))
    draft = Draft(list(range(guesses)), list(range(-1, guesses - 1)), window.scouts() if scouts else None)
    return engine_rows.Rows.build(7, context, draft)


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

    def once(rows: engine_rows.Rows, reads: Any) -> Callable[[], float]:
        return lambda: seconds(lambda: run([ForwardRequest(lm, rows, kv, reads, rows.want)]))

    chosen = sides["fafo"][0]
    works = {name: once(rows, reads) for name, (rows, reads) in sides.items()}
    works["fafo_choosing"] = lambda: once(chosen, view.rebind(kv))()  # chosen anew, as every `refresh` tokens
    times = in_turns(works, reps, 2)
    scouts = sides["fafo"][0].n_rows - sides["fafo"][0].tree
    each = {
        name: spread([1000 * (a - b) / scouts for a, b in zip(times[name], times["guesses"], strict=True)])
        for name in ("lookahead", "fafo")
    }
    return {
        "context": context,
        **{f"{name}_ms": round(1000 * median(took), 2) for name, took in times.items()},
        "choosing_ms_per_token": spread(
            [1000 * (a - b) / fafo.refresh for a, b in zip(times["fafo_choosing"], times["fafo"], strict=True)]
        ),
        "lookahead_ms_per_scout": each["lookahead"],
        "fafo_ms_per_scout": each["fafo"],
    }


@measurement("Milliseconds of a pass, and of each scout in it", schema="kvcli.bench.growth/1")
def growth(contexts: Ints = (1024, 4096, 16384), reps: int = 9) -> Rows:
    lm = ours_of(build())
    with torch.inference_mode():
        for context in contexts:
            yield measure(lm, context, reps)


if __name__ == "__main__":
    growth.main()
