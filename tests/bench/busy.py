"""Decoding beside other programs: how much of its speed is left with one busy process for each core.

    python tests/bench/busy.py [--prompt 512] [--new 12] [--reps 8] [--out FILE]

The random 152M Llama of decode.py on all cores. Turns of a few tokens, quiet and busy by turns; the busy processes only
count, at the same priority. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvcli.engine.engine import iterate_events
from kvcli.engine.threads import use_threads
from tests.bench.decode import build, ours, ours_of
from tests.bench.harness import machine


def count() -> None:
    """Busy until it is ended."""
    while True:
        sum(range(100_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=12, help="tokens of one turn")
    parser.add_argument("--reps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    use_threads(cores)
    lm = ours_of(build())
    ids = torch.randint(8, 16384, (args.prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    _, _, session = ours(lm, ids, 4)

    def speed() -> float:
        began = time.perf_counter()
        n = sum(1 for _ in iterate_events(session.stream(args.new)))
        return n / (time.perf_counter() - began)

    speed()
    spawn, quiet, busy = multiprocessing.get_context("spawn"), list[float](), list[float]()
    for _ in range(args.reps):
        quiet.append(speed())
        others = [spawn.Process(target=count, daemon=True) for _ in range(cores)]
        for other in others:
            other.start()
        time.sleep(1.0)
        busy.append(speed())
        for other in others:
            other.kill()
            other.join()
    share = [b / q for b, q in zip(busy, quiet, strict=True)]
    for name, values in (("quiet", quiet), ("busy", busy)):
        print(f"{name:6} {statistics.median(values):7.1f} tokens/s ({min(values):.1f} to {max(values):.1f})")
    print(f"share  {statistics.median(share):7.2f} ({min(share):.2f} to {max(share):.2f})")
    found = {"what": "decoding beside a busy process a core", "cores": cores, "prompt": args.prompt}
    text = json.dumps({**found, "quiet": quiet, "busy": busy, "share": statistics.median(share), "machine": machine()})
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
