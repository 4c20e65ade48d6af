"""How long a command takes to start: user time and wall time of whole commands, rounds interleaved.

    python tests/bench/start.py [--old CHECKOUT] [--reps 7] [--out FILE]

Help, a typing error, one question to the demo about its report, and `import torch` alone, which is the floor of every
command that answers. With --old the same commands of another checkout take turns with ours. The first round counts for
nothing: it writes bytecode and looks at the machine once. Prints a table, then JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

COMMANDS = {
    "help": ["-m", "kvcli", "--help"],
    "typing error": ["-m", "kvcli", "chat", "dmo", "--offline", "-p", "hi"],
    "import torch": ["-c", "import torch"],
    "one question": ["-m", "kvcli", "chat", "demo", "-f", "demo:report", "-p", "What is the stock of depot Gimness?"],
}


def once(command: str, checkout: Path, home: str) -> tuple[float, float]:
    """User and wall seconds of one process."""
    env = os.environ | {"PYTHONPATH": str(checkout), "KVCLI_HOME": home, "HF_HUB_OFFLINE": "1"}
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, *COMMANDS[command]], cwd=home, env=env, **quiet)
    _, _, used = os.wait4(child.pid, 0)
    return used.ru_utime, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="another checkout to compare with")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    from tests.bench.harness import machine

    sides = {"ours": ROOT, **({"old": args.old.resolve()} if args.old else {})}
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        homes = {side: Path(folder, side) for side in sides}
        for home in homes.values():
            home.mkdir()
        for i in range(args.reps + 1):
            for command in COMMANDS:
                for side in [*sides][:: -1 if i % 2 else 1]:
                    found = once(command, sides[side], str(homes[side]))
                    if i:
                        times.setdefault((command, side), []).append(found)
    rows = []
    for (command, side), found in times.items():
        user, wall = ([one[j] for one in found] for j in (0, 1))
        row = {"command": command, "side": side, "user_s": statistics.median(user), "wall_s": statistics.median(wall)}
        rows.append({**row, "user_low": min(user), "user_high": max(user)})
        span = f"{min(user):.2f}-{max(user):.2f}"
        print(f"{command:<14} {side:<5} user {row['user_s']:.2f} s ({span})  wall {row['wall_s']:.2f} s")
    about = machine()
    result = {
        "title": "Time to start",
        "command": f"python tests/bench/start.py --reps {args.reps}{' --old CHECKOUT' if args.old else ''}",
        "machine": f"{about['cpu']}, {about['threads']} thread(s), torch {about['torch']}, "
        f"transformers {about['transformers']}, commit {about['commit']}, load {about['load_average']}",
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
