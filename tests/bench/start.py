"""How long a command takes to start: user time and wall time of whole commands, rounds interleaved.

    python tests/bench/start.py [--old CHECKOUT] [--model demo] [--reps 7] [--out FILE]

Help, a typing error, one question to the demo about its report, and `import torch` alone, which is the floor of every
command that loads a model. With --old the same commands of another checkout take turns with ours. The first round does
not count: it writes bytecode and looks at the machine once.

Last the question to --model, and one without a document, beside `kvcli serve`, in turns with the same without it and
with those of --old: user time of the command and of its process in the server, wall time, and wall time to the first
character of the answer.
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
from tests.bench.harness import ROOT, Rows, in_turns, measurement, picked

COMMANDS = {
    "help": ["-m", "kvcli", "--help"],
    "typing error": ["-m", "kvcli", "chat", "dmo", "--offline", "-p", "hi"],
    "import torch": ["-c", "import torch"],
    "one question": ["-m", "kvcli", "chat", "demo", "-f", "demo:report", "-p", "What is the stock of depot Gimness?"],
}


def environment(checkout: Path, home: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(checkout), "KVCLI_HOME": home, "HF_HUB_OFFLINE": "1"}


def once(command: list[str], checkout: Path, home: str) -> tuple[float, float]:
    """User and wall seconds of one process."""
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, *command], cwd=home, env=environment(checkout, home), **quiet)
    _, _, used = os.wait4(child.pid, 0)
    return used.ru_utime, time.perf_counter() - began


def asked(command: list[str], checkout: Path, home: str, server: int) -> tuple[float, float, float]:
    """User seconds of a command, with its process in the server; its wall seconds; those to its first character."""
    before, began = _of_children(server), time.perf_counter()
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, *command], cwd=home, env=environment(checkout, home), bufsize=0, **pipes)
    child.stdout.read(1)
    first = time.perf_counter() - began
    while child.stdout.read(1 << 16):
        pass
    _, _, used = os.wait4(child.pid, 0)
    return used.ru_utime + _of_children(server) - before, time.perf_counter() - began, first


def _of_children(process: int) -> float:
    """User seconds of the children of a process that ended."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(words[13]) / os.sysconf("SC_CLK_TCK")


@measurement("Time to start")
def start(
    old: Annotated[Path | None, "another checkout to compare with"] = None,
    commands: Annotated[tuple[str, ...], "names of the commands"] = tuple(COMMANDS),
    model: Annotated[str, "model that kvcli serve loads"] = "demo",
    reps: int = 7,
) -> Rows:
    checkouts = {"ours": ROOT, **({"old": old.resolve()} if old else {})}
    with tempfile.TemporaryDirectory() as folder:
        for side in checkouts:
            Path(folder, side).mkdir()
        for command in picked(commands, COMMANDS):
            works = {
                side: partial(once, COMMANDS[command], at, str(Path(folder, side))) for side, at in checkouts.items()
            }
            for side, found in in_turns(works, reps).items():
                user, wall = ([one[j] for one in found] for j in (0, 1))
                row = {"command": command, "side": side, "user_s": median(user), "wall_s": median(wall)}
                yield {**row, "user_low": min(user), "user_high": max(user)}
        servers, processes = [], dict[str, tuple[Path, str, int]]()
        for side, at in checkouts.items():
            home = str(Path(folder, side))
            serves = [sys.executable, "-m", "kvcli", "serve", model, "--port", "0"]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            servers.append(subprocess.Popen(serves, cwd=home, env=environment(at, home), **pipes))
            servers[-1].stdout.readline()  # its address: the model is loaded
            (file,) = Path(home, "state", "resident").glob("*.json")
            processes[f"kvcli serve, {side}"] = at, home, int(file.stem)
        report = [model if word == "demo" else word for word in COMMANDS["one question"]]
        short = ["-m", "kvcli", "chat", model, "-p", "Hello", "--max-new-tokens", "4"]
        for name, question in (("one question", report), ("no document", short)):
            works = {side: partial(asked, question, *its) for side, its in processes.items()}
            alone = processes["kvcli serve, ours"]
            works["loads itself"] = partial(asked, [*question, "--no-server"], *alone)
            for side, found in in_turns(works, reps).items():
                user, wall, first = ([one[j] for one in found] for j in (0, 1, 2))
                row = {"command": f"{name} to {Path(model).name}", "side": side, "user_s": median(user)}
                row |= {"wall_s": median(wall), "first_s": median(first), "first_low": min(first)}
                yield {**row, "user_low": min(user), "user_high": max(user)}
        for server in servers:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    start.main()
