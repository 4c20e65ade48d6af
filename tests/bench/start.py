"""How long a command takes to start: user time and wall time of whole commands, rounds interleaved.

    python tests/bench/start.py [--old CHECKOUT] [--reps 7] [--out FILE]

Help, a typing error, one question to the demo about its report, and `import torch` alone, which is the floor of every
command that answers. With --old the same commands of another checkout take turns with ours. The first round counts for
nothing: it writes bytecode and looks at the machine once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.bench.harness import ROOT, Rows, in_turns, measurement

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


@measurement("Time to start")
def start(old: Annotated[Path | None, "another checkout to compare with"] = None, reps: int = 7) -> Rows:
    checkouts = {"ours": ROOT, **({"old": old.resolve()} if old else {})}
    with tempfile.TemporaryDirectory() as folder:
        for side in checkouts:
            Path(folder, side).mkdir()
        for command in COMMANDS:
            works = {side: partial(once, command, at, str(Path(folder, side))) for side, at in checkouts.items()}
            for side, found in in_turns(works, reps).items():
                user, wall = ([one[j] for one in found] for j in (0, 1))
                row = {"command": command, "side": side, "user_s": median(user), "wall_s": median(wall)}
                yield {**row, "user_low": min(user), "user_high": max(user)}


if __name__ == "__main__":
    start.main()
