"""This checkout against an earlier one: reading and plain decoding of the same random model, in turns, in one run.

    git worktree add /tmp/before COMMIT
    python tests/bench/against.py /tmp/before [--prompts 512,4096,16384] [--new 24] [--reps 5] [--out FILE]

Each side is a process that has loaded its own checkout (`build`, `ours_of`, `ours` and `rows_against_row` of its
tests/bench/decode.py) and works when it is told to. Also one pass of 8 rows. Ratios above 1: this checkout is faster.
Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import json, statistics, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from tests.bench import decode
lm = decode.ours_of(decode.build())
for line in sys.stdin:
    n, new = json.loads(line)
    ids = torch.randint(8, 16384, (n,), generator=torch.Generator().manual_seed(1)).tolist()
    first, steps, session = decode.ours(lm, ids, new)
    one, eight = decode.rows_against_row(session, 8, 9)
    del session
    found = {"read": first, "decode": statistics.median(steps), "pass of 8": statistics.median(eight)}
    print(json.dumps(found), flush=True)
"""


class Side:
    """A checkout at work."""

    def __init__(self, checkout: Path) -> None:
        self.commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
        ).stdout.strip()
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", WORKER, str(checkout)]
        self._process = subprocess.Popen(command, cwd=checkout, stdin=pipe, stdout=pipe, text=True)

    def measure(self, n: int, new: int) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([n, new]) + "\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("--prompts", default="512,4096,16384")
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sides = [Side(args.before.resolve()), Side(ROOT)]
    for side in sides:
        side.measure(64, 4)  # warm
    rows: list[dict[str, Any]] = []
    print(f"{sides[1].commit} against {sides[0].commit}, times as fast (min, median, max)")
    for n in map(int, args.prompts.split(",")):
        pairs = []
        for rep in range(args.reps):
            order = sides if rep % 2 else sides[::-1]
            found = {id(side): side.measure(n, args.new) for side in order}
            pairs.append([found[id(side)] for side in sides])
        for what in pairs[0][0]:
            times = sorted(before[what] / now[what] for before, now in pairs)
            row = {"prompt": n, "what": what, "times": [round(x, 3) for x in times]}
            rows.append(row)
            low, middle, high = times[0], statistics.median(times), times[-1]
            print(f"{n:7,}  {what:10} {low:6.3f} {middle:6.3f} {high:6.3f}", flush=True)
    text = json.dumps({"before": sides[0].commit, "now": sides[1].commit, "rows": rows})
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
