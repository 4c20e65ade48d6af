"""What was tried to break kvcli, how often, and how often it broke: all storms, one after the other.

    python tests/bench/reliability.py [--only stress_faults,stress_kills] [--out FILE]

Each storm ends with a line of JSON, which becomes a row. A storm that is not run keeps the row of the last result under
docs/benchmarks; one that comes to no end is no row.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "benchmarks" / "reliability.json"
STORMS = {
    "stress_faults": "",
    "stress_kills": "",
    "stress_chats": "",
    "stress_models": "--count 50000",
    "stress_documents": "",
    "stress_exact": "--runs 530 --dtypes bf16",  # 100,000 tokens
    "stress_summaries": "",
}


def measure(name: str, more: str) -> dict[str, Any] | None:
    """The last line of a storm, with the commit it ran at."""
    began = time.monotonic()
    command = [sys.executable, str(ROOT / "tests" / "bench" / f"{name}.py"), *shlex.split(more)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    if not lines or not lines[-1].startswith("{"):
        print(f"{name} came to no end", file=sys.stderr)
        return None
    found = json.loads(lines[-1])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    return {
        "storm": name,
        "what": found["what"],
        "tried": found["tried"],
        "bad": found["bad"],
        "command": f"python tests/bench/{name}.py {more}".strip(),
        "commit": commit.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(STORMS), help="names, with commas between")
    parser.add_argument("--set", action="append", default=[], metavar="STORM=ARGS", help="other arguments for a storm")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    given = STORMS | dict(one.split("=", 1) for one in args.set)
    kept = {row["storm"]: row for row in json.loads(KEPT.read_text())["rows"]} if KEPT.exists() else {}
    for name in args.only.split(","):
        if (row := measure(name, given[name])) is not None:
            kept[name] = row
            print(json.dumps(row), flush=True)
    result = {
        "schema": "kvcli.bench.reliability/1",
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "command": "python docs/benchmarks/run.py reliability",
        "rows": [kept[name] for name in STORMS if name in kept],
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
