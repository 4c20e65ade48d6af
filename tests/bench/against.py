"""This checkout against an earlier one: reading and plain decoding of the same random model, in turns, in one run.

    git worktree add /tmp/before COMMIT
    python tests/bench/against.py [--before /tmp/before] [--prompts 512,4096,16384] [--stores k8v8,k4v4] [--slots 4096]
        [--profiles exact,lean] [--reps 20] [--reads 2] [--out FILE]

Each side is a process that has loaded its own checkout (`build`, `ours_of`, `ours` and `rows_against_row` of its
tests/bench/decode.py) and works when it is told to: a few tokens here, a few there. Also passes of 8 rows, steps and
passes over KV that is stored otherwise (`--stores`: sides of kv_speed.py, so many `--slots` of noise), and the time to
the first token of a second question behind kept KV (`--profiles`: those of resume.py, 1,000 tokens). Ratios above 1:
this checkout is faster. `least` compares the shortest steps, the shortest passes of either side: what a busy machine
leaves alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.bench.harness import ROOT, Ints, Rows, Words, in_turns, measurement, quotients

WORKER = """
import json, sys
sys.path.insert(0, "")
import torch
torch.set_num_threads(1)
from tests.bench import decode, kv_speed, resume
from kvcli.engine.engine import iterate_events
lm = decode.ours_of(decode.build())
for line in sys.stdin:
    what, n = json.loads(line)
    if what == "read":
        ids = torch.randint(8, 16384, (n,), generator=torch.Generator().manual_seed(1)).tolist()
        found, _, session = decode.ours(lm, ids, 2)
    elif what == "decode":
        found = [step.seconds for step in iterate_events(session.stream(n))]
    elif what == "store":
        store = kv_speed.session(lm, *n)
        found = kv_speed.step_seconds(store, 64)
    elif what == "steps":
        found = kv_speed.step_seconds(store, n)
    elif what == "rows":
        found = [kv_speed.pass_seconds(store, n) for _ in range(3)]
    elif what == "resume":
        found = resume.resumed(1000, 1, n)["kept_s"]
    else:
        found = decode.rows_against_row(session, n, 3)[1]
    print(json.dumps(found if isinstance(found, list) else [found]), flush=True)
"""


class Checkout:
    """A checkout at work in a process of its own, which answers each line of JSON with another."""

    def __init__(self, root: Path, *words: str) -> None:
        git = ["git", "describe", "--always", "--dirty"]
        self.commit = subprocess.run(git, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, *words], cwd=root, stdin=pipe, stdout=pipe, text=True)

    def measure(self, *asked: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@measurement("This checkout in multiples of the speed of an earlier one")
def against(
    before: Annotated[Path, "the earlier checkout"] = Path("/tmp/before"),
    prompts: Ints = (512, 4096, 16384),
    new: Annotated[int, "tokens of one turn"] = 6,
    reps: Annotated[int, "turns of decoding, and of passes of 8 rows"] = 20,
    reads: int = 2,
    stores: Words = (),
    slots: int = 4096,
    profiles: Words = (),
) -> Rows:
    sides = {name: Checkout(root, "-c", WORKER) for name, root in (("before", before), ("now", ROOT))}
    for side in sides.values():
        side.measure("read", 64)  # warm
    parts: list[tuple[object, list[tuple[str, object, int]]]] = [
        (n, [("read", n, reads), ("decode", new, reps), ("pass", 8, reps)]) for n in prompts
    ]
    for name in stores:
        parts.append((name, [("store", [name, slots], 1), ("steps", new, reps), ("rows", 1, reps), ("rows", 8, reps)]))
    parts += [(name, [("resume", name, reads)]) for name in profiles]
    for of, asked in parts:
        for what, size, turns in asked:
            work: dict[str, Callable[[], list[float]]] = {
                name: partial(side.measure, what, size) for name, side in sides.items()
            }
            found = in_turns(work, turns, 0)
            least = [min(min(turn) for turn in found[name]) for name in sides]
            times = quotients(map(median, found["before"]), map(median, found["now"]), 3)
            named = f"{what} of {size}" if what == "rows" else what
            yield {"of": of, "what": named, "times": times, "least": round(least[0] / least[1], 3)}
    return {"before": sides["before"].commit}


if __name__ == "__main__":
    against.main()
