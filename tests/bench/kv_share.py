"""Where the time of a decoding pass goes, by how keys and values are stored: attention over the store, and the rest.

    python tests/bench/kv_share.py [--slots 16384] [--reps 20] [--only dense,k8v8,keep25,two] [--out FILE]

The sides of kv_speed.py, their passes of one row in random order. Processor time of one thread, which other programs
disturb less than the clock; least of all passes, and a quarter of them took no longer than the second figure. "By
bytes" is what a side could gain over the first one if a pass took only the time of reading weights, keys and values
once.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.kv.slots import nbytes
from tests.bench.harness import Rows, Words, measurement
from tests.bench.kv_speed import session
from tests.bench.random_model import build, ours_of


def pass_seconds(session: Any) -> tuple[float, float]:
    """Processor seconds of one pass of one row, and those in the store; nothing of it is kept."""
    from kvcli.engine.engine import run
    from kvcli.engine.forward_request import Draft, ForwardRequest, Rows

    kv, spent = session.cache, 0.0

    class Timed:
        dtype = kv.dtype

        def attend(self, *args: Any) -> Any:
            nonlocal spent
            began = time.thread_time()
            parts = kv.attend(*args)
            spent += time.thread_time() - began
            return parts

    built = Rows.build(session.ids[-1], len(session.ids) - 1, Draft([], []))
    began = time.thread_time()
    run([ForwardRequest(session.lm, built, Timed(), want=range(1))])  # type: ignore[arg-type]
    return time.thread_time() - began, spent


def low(values: list[float]) -> list[float]:
    """Milliseconds: the least, and the first quartile."""
    return [round(1000 * sorted(values)[at], 2) for at in (0, len(values) // 4)]


@measurement("A pass of one row over {slots:,} stored tokens: attention, and the rest", schema="kvcli.bench.kv_share/1")
def kv_share(
    slots: int = 16384,
    reps: int = 20,
    only: Annotated[Words, "the others are held against the first one"] = ("dense", "k8v8", "keep25", "two"),
) -> Rows:
    torch.set_num_threads(1)
    lm = ours_of(build())
    sessions = {side: session(lm, side, slots) for side in only}
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sessions}
    order, first = list(sessions), dict[str, Any]()
    for rep in range(reps + 1):
        random.shuffle(order)  # or each side would find in the cache what the one before it left there
        for side in order:
            took = pass_seconds(sessions[side])
            if rep:  # the first is a warm-up
                found[side].append(took)
    for side, each in found.items():
        kv = sum(nbytes(sessions[side].cache).values())
        row: dict[str, Any] = {"side": side, "mib": round(kv / 2**20, 1)}
        row["attention_ms"], row["rest_ms"] = low([a for _, a in each]), low([t - a for t, a in each])
        row |= {"pass_ms": low([t for t, _ in each]), "read_mib": round((lm.info.weight_bytes + kv) / 2**20, 1)}
        first = first or row
        row["speedup"] = round(first["pass_ms"][0] / row["pass_ms"][0], 2)
        yield row | {"by_bytes": round(first["read_mib"] / row["read_mib"], 2)}
    return {"slots": slots}


if __name__ == "__main__":
    kv_share.main()
