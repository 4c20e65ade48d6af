"""SIGKILL at random moments of what writes for long: `python tests/bench/stress_kills.py`.

The tier on disk, `bench --calibrate` as it keeps what it measured, and the whole command as a process of its own. Bad
is: a file that is damaged or left over once another run began, a run that fails after the kill, a process that goes on.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.harness import Rows, is_unbroken, measurement


def killed(work: Callable[[], object], after: float) -> None:
    """`work` again and again in a process of its own, until it is killed."""
    child = os.fork()
    if not child:
        _for_ever(work)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _for_ever(work: Callable[[], object]) -> NoReturn:
    try:
        while True:
            work()
    finally:
        os._exit(1)


def disk(rng: random.Random, bad: list[str]) -> None:
    """The tier's file has no name: nothing of it outlives the process."""
    import torch

    from kvcli.kv.slots import alike
    from kvcli.kv.tiers.disk import ExtentTier, SlotFile

    folder = Path(tempfile.mkdtemp(prefix="kvcli-kills-"))
    k = torch.randn(2, 64, 16)

    def work() -> None:
        tier = ExtentTier(SlotFile(alike(2, 2, 16), torch.float32, 4 << 20, 1 << 30, folder))
        for i in range(40):
            tier.append(i % 2, k, -k, 64 * (i // 2))
            if i % 8 == 7:
                tier.evict_except(i % 2, torch.rand(2, tier.n_slots(i % 2)) < 0.5)

    killed(work, rng.random() * 0.05)
    bad += [f"disk tier: {p.name} is left over" for p in folder.iterdir()]
    work()
    shutil.rmtree(folder)


def calibration(rng: random.Random, bad: list[str]) -> None:
    """Kept in one step: what is there is whole, and the next run sweeps what was being written."""
    from kvcli.fit.run_log import load_calibration
    from tests.bench.stress_faults import _calibrate, furnish

    folder = Path(tempfile.mkdtemp(prefix="kvcli-kills-"))
    furnish(folder)
    killed(lambda: _calibrate(folder), rng.random() * 0.05)
    cache = folder / "home" / "cache"
    load_calibration(cache, "abc", tell=bad.append)
    code, _, err = _calibrate(folder)
    if code or load_calibration(cache, "abc", tell=bad.append) is None:
        bad.append(f"bench --calibrate: exit {code} after a kill: {err}")
    bad += [f"bench --calibrate: {p.name} is left over" for p in folder.rglob("*.part")]
    shutil.rmtree(folder)


def command(rng: random.Random, bad: list[str]) -> None:
    """The command with its processes for measuring: none goes on, and the cache can be read."""
    home = Path(tempfile.mkdtemp(prefix="kvcli-kills-"))
    env = os.environ | {"KVCLI_HOME": str(home), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    args = [sys.executable, "-m", "kvcli", "bench", "--calibrate", "demo", "--json"]
    process = subprocess.Popen(args, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        process.wait(timeout=rng.uniform(0.5, 25))
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate()
    for file in home.rglob("*.json"):
        try:
            json.loads(file.read_text())
        except ValueError:
            bad.append(f"bench --calibrate: {file.name} is damaged")
    again = subprocess.run([*args[:3], "fit", "demo", "--json"], env=env, capture_output=True, text=True, check=False)
    if again.returncode or "Traceback" in again.stderr:
        bad.append(f"fit after a killed calibration: exit {again.returncode}: {again.stderr[-300:]}")
    bad += [f"bench --calibrate: process {pid} goes on" for pid in _of_session(process.pid)]
    shutil.rmtree(home)


def _of_session(session: int, patience: float = 20) -> list[int]:
    """Processes that are left of it; one that was measuring may come to its end."""
    import psutil

    end = time.monotonic() + patience
    while True:
        left = [p for p in psutil.pids() if _session(p) == session]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.2)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


@measurement("Kills of the disk tier and of bench --calibrate", is_right=is_unbroken)
def stress_kills(
    kills: Annotated[int, "of the disk tier, and of a calibration that is kept"] = 400,
    commands: Annotated[int, "kills of the whole command"] = 12,
) -> Rows:
    rng, bad = random.Random(0), list[str]()
    for what, n in ((disk, kills), (calibration, kills), (command, commands)):
        for _ in range(n):
            what(rng, bad)
        print(f"{what.__name__}: {n:,} kills, {len(bad)} bad", file=sys.stderr, flush=True)
    print("\n".join(bad))
    yield {"what": "kills of the disk tier and of bench --calibrate", "tried": 2 * kills + commands, "bad": len(bad)}


if __name__ == "__main__":
    stress_kills.main()
