"""Where the time of a decoding pass goes, by how keys and values are stored: attention over the store, and the rest.

    python tests/bench/kv_share.py [--slots 16384] [--reps 20] [--only dense,k8v8,keep25,two] [--out FILE]

The sides of kv_speed.py, their passes of one row in random order. Processor time of one thread, which other programs
disturb less than the clock; least of all passes, and a quarter of them took no longer than the second figure. "By
bytes" is what a side could gain over the first one if a pass took only the time of reading weights, keys and values
once. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.kv.slots import nbytes
from tests.bench.decode import build, ours_of
from tests.bench.harness import machine
from tests.bench.kv_speed import session


def pass_seconds(session: Any) -> tuple[float, float]:
    """Processor seconds of one pass of one row, and those in the store; nothing of it is kept."""
    from kvcli.engine.engine import run
    from kvcli.engine.forward_request import ForwardRequest
    from kvcli.engine.rows import Draft, Rows

    kv, spent = session.cache, 0.0

    class Timed:
        dtype = kv.dtype

        def attend(self, *args: Any) -> Any:
            nonlocal spent
            began = time.thread_time()
            parts = kv.attend(*args)
            spent += time.thread_time() - began
            return parts

    built = Rows.build(session.ids[-1], len(session.ids) - 1, Draft.none())
    began = time.thread_time()
    run([ForwardRequest(session.lm, built, Timed(), want=range(1))])  # type: ignore[arg-type]
    return time.thread_time() - began, spent


def low(values: list[float]) -> list[float]:
    """Milliseconds: the least, and the first quartile."""
    return [round(1000 * sorted(values)[at], 2) for at in (0, len(values) // 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=16384)
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--only", default="dense,k8v8,keep25,two", help="the others are held against the first one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lm = ours_of(build())
    sessions = {side: session(lm, side, args.slots) for side in args.only.split(",")}
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sessions}
    order = list(sessions)
    for rep in range(args.reps + 1):
        random.shuffle(order)  # or each side would find in the cache what the one before it left there
        for side in order:
            seconds = pass_seconds(sessions[side])
            if rep:  # the first is a warm-up
                found[side].append(seconds)
    rows: list[dict[str, Any]] = []
    for side, each in found.items():
        kv = sum(nbytes(sessions[side].cache).values())
        row: dict[str, Any] = {"side": side, "mib": round(kv / 2**20, 1)}
        row["attention_ms"], row["rest_ms"] = low([a for _, a in each]), low([t - a for t, a in each])
        row["pass_ms"] = low([t for t, _ in each])
        read = lm.info.weight_bytes + kv
        row["read_mib"] = round(read / 2**20, 1)
        first = rows[0] if rows else row
        row["speedup"] = round(first["pass_ms"][0] / row["pass_ms"][0], 2)
        row["by_bytes"] = round(first["read_mib"] / row["read_mib"], 2)
        rows.append(row)
    print("side      KV MiB   attention ms     rest ms          pass ms          speedup   by bytes")
    for row in rows:
        times = "   ".join(f"{a:6.2f} {b:6.2f}" for a, b in (row[f"{k}_ms"] for k in ("attention", "rest", "pass")))
        print(f"{row['side']:8} {row['mib']:7.1f}   {times}   {row['speedup']:7.2f}   {row['by_bytes']:8.2f}")
    result = {"schema": "kvcli.bench.kv_share/1", "environment": machine(), "slots": args.slots, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
