"""This checkout against an earlier one: reading and plain decoding of the same random model, in turns, in one run.

    git worktree add /tmp/before COMMIT
    python tests/bench/against.py /tmp/before [--prompts 512,4096,16384] [--reps 20] [--reads 2] [--out FILE]

Each side is a process that has loaded its own checkout (`build`, `ours_of`, `ours` and `rows_against_row` of its
tests/bench/decode.py) and works when it is told to: a few tokens here, a few there. Also passes of 8 rows. Ratios above
1: this checkout is faster. `least` compares the shortest steps, the shortest passes of either side: what a busy machine
leaves alone.
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
try:
    from kvcli.engine.engine import iterate_events
except ImportError:  # before sessions yielded feeds
    iterate_events = iter
lm = decode.ours_of(decode.build())
for line in sys.stdin:
    what, n = json.loads(line)
    if what == "read":
        ids = torch.randint(8, 16384, (n,), generator=torch.Generator().manual_seed(1)).tolist()
        found, _, session = decode.ours(lm, ids, 2)
    elif what == "decode":
        found = [step.seconds for step in iterate_events(session.stream(n))]
    else:
        found = decode.rows_against_row(session, n, 3)[1]
    print(json.dumps(found if isinstance(found, list) else [found]), flush=True)
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

    def measure(self, what: str, n: int) -> list[float]:
        """Seconds: of reading n tokens, of each step of the n next ones, of each pass of n rows."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, n]) + "\n")
        self._process.stdin.flush()
        found: list[float] = json.loads(self._process.stdout.readline())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("--prompts", default="512,4096,16384")
    parser.add_argument("--new", type=int, default=6, help="tokens of one turn")
    parser.add_argument("--reps", type=int, default=20, help="turns of decoding, and of passes of 8 rows")
    parser.add_argument("--reads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sides = [Side(args.before.resolve()), Side(ROOT)]
    for side in sides:
        side.measure("read", 64)  # warm
    rows: list[dict[str, Any]] = []
    print(f"{sides[1].commit} against {sides[0].commit}, times as fast (min, quartiles, max; least)")
    for n in map(int, args.prompts.split(",")):
        for what, size, reps in (("read", n, args.reads), ("decode", args.new, args.reps), ("pass", 8, args.reps)):
            times, least = [], [float("inf")] * 2
            for rep in range(reps):
                order = sides if rep % 2 else sides[::-1]
                found = {id(side): side.measure(what, size) for side in order}
                both = [found[id(side)] for side in sides]
                times.append(statistics.median(both[0]) / statistics.median(both[1]))
                least = [min(old, *new) for old, new in zip(least, both, strict=True)]
            quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
            spread = [round(x, 3) for x in (min(times), *quartiles, max(times))]
            shortest = round(least[0] / least[1], 3)
            rows.append({"prompt": n, "what": what, "times": spread, "least": shortest})
            print(f"{n:7,}  {what:8}", *(f"{x:6.3f}" for x in spread), f"  {shortest:6.3f}", flush=True)
    text = json.dumps({"before": sides[0].commit, "now": sides[1].commit, "rows": rows})
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
