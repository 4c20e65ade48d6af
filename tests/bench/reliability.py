"""What was tried to break kvcli, how often, and how often it broke: all storms, one after the other.

    python tests/bench/reliability.py [--only stress_faults,stress_kills] [--out FILE]

Each storm ends with a line of JSON, of which the row is taken. A storm that is not run, or comes to no end, keeps the
row of the last result under docs/benchmarks.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.bench.harness import ROOT, Row, Rows, Words, is_unbroken, measurement, once, picked

KEPT = ROOT / "docs" / "benchmarks" / "reliability.json"
STORMS = {
    "stress_faults": "--step 4",
    "stress_kills": "",
    "stress_chats": "--kills 150 --pairs 10",
    "stress_models": "--count 5000",
    "stress_documents": "--count 1500",
    "stress_exact": "--runs 530 --dtypes bf16",  # 100,000 tokens
    "stress_summaries": "--runs 10",
    "stress_sequences": "--runs 200",
}


def measure(name: str) -> Row | None:
    """What a storm found, with the commit it ran at."""
    began = time.monotonic()
    command = [sys.executable, str(ROOT / "tests" / "bench" / f"{name}.py"), *shlex.split(STORMS[name])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    last = (done.stdout.splitlines() or [""])[-1]
    if not last.startswith("{"):
        print(f"{name} came to no end", file=sys.stderr)
        return None
    found = json.loads(last)
    row = {"storm": name} | {key: found["rows"][-1][key] for key in ("what", "tried", "bad")}
    row |= {"command": found["command"], "commit": found["environment"]["commit"]}
    minutes = round((time.monotonic() - began) / 60, 1)
    return row | {"date": datetime.now(UTC).date().isoformat(), "minutes": minutes}


@measurement(
    "Stress tests", columns=["what", "tried", "bad", "command", "commit", "date", "minutes"], is_right=is_unbroken
)
def reliability(only: Words = tuple(STORMS)) -> Rows:
    kept = {row["storm"]: row for row in json.loads(KEPT.read_text())["rows"]}
    asked = picked(only, STORMS)
    for name in STORMS:
        if row := (once(name, partial(measure, name)) if name in asked else None) or kept.get(name):
            yield row


if __name__ == "__main__":
    reliability.main()
