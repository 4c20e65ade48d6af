"""Decoding beside other programs: how much of its speed is left with one busy process for each core.

    python tests/bench/busy.py [--prompt 512] [--new 12] [--reps 8] [--out FILE]

The random 152M Llama of decode.py on all cores. Turns of a few tokens, quiet and busy by turns; the busy processes only
count, at the same priority.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.engine.engine import iterate_events
from kvcli.engine.resources import use_threads
from tests.bench.decode import ours
from tests.bench.harness import Rows, in_turns, measurement, quotients, spread
from tests.bench.random_model import build, noise, ours_of


def count() -> None:
    """Busy until it is ended."""
    while True:
        sum(range(100_000))


@measurement("Decoding beside a busy process for each core")
def busy(prompt: int = 512, new: Annotated[int, "tokens of one turn"] = 12, reps: int = 8) -> Rows:
    cores = len(os.sched_getaffinity(0))
    use_threads(cores)
    lm = ours_of(build())
    ids = noise(prompt)
    _, _, session = ours(lm, ids, 4)

    def speed() -> float:
        began = time.perf_counter()
        n = sum(1 for _ in iterate_events(session.stream(new)))
        return n / (time.perf_counter() - began)

    def speed_beside() -> float:
        others = [spawn.Process(target=count, daemon=True) for _ in range(cores)]
        for other in others:
            other.start()
        time.sleep(1.0)
        try:
            return speed()
        finally:
            for other in others:
                other.kill()
                other.join()

    speed()
    spawn = multiprocessing.get_context("spawn")
    found = in_turns({"quiet": speed, "busy": speed_beside}, reps, 0)
    for name, each in found.items():
        yield {"side": name, "tokens a second": spread(each, 1), "share": quotients(each, found["quiet"], 2)}


if __name__ == "__main__":
    busy.main()
