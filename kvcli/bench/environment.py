"""Environment of a measurement: date, processor, versions, commit, and load by other programs."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime
from pathlib import Path

import psutil

from kvcli.models import machine
from kvcli.models.machine import installed
from kvcli.schemas.bench import BenchEnv
from kvcli.version import __version__

PACKAGES = ("torch", "transformers", "tokenizers")
BUSY = 0.25  # share of the cores that others may use before a machine counts as busy


def environment(device: str, before: list[float] | None) -> BenchEnv:
    """Describe the environment. `before`: the load average before loading; the current one is the load after."""
    after, cores = load_average(), machine.cores()
    return BenchEnv(
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=machine.cpu_name(),
        gpus=[found.name for found in machine.devices() if found.kind.startswith("cuda")],
        device=device,
        cores=cores,
        threads=machine.threads(),
        memory_total=psutil.virtual_memory().total,
        versions={"kvcli": __version__, "python": platform.python_version(), **{p: installed(p) for p in PACKAGES}},
        commit=commit(Path(__file__).resolve().parents[2]),
        load_before=before,
        load_after=after,
        quiet=is_quiet(before, after, cores or 1, machine.threads()),
    )


def load_average() -> list[float] | None:
    """Load average over 1, 5 and 15 minutes; None if the system has none."""
    try:
        return [round(x, 2) for x in os.getloadavg()]
    except (AttributeError, OSError):
        return None


def is_quiet(before: list[float] | None, after: list[float] | None, cores: int, threads: int) -> bool | None:
    """True if other programs left the cores free: nearly idle before, and afterwards loaded by our threads only."""
    if before is None or after is None:
        return None
    return before[0] <= BUSY * cores and after[0] <= threads + BUSY * cores


def commit(folder: Path) -> str | None:
    """Commit of a checkout, with + appended if files of the package were changed; None without a checkout."""
    if not (folder / ".git").exists():
        return None
    head = _git(folder, "rev-parse", "--short", "HEAD")
    if not head:
        return None
    return head + ("+" if _git(folder, "status", "--porcelain", "--", "kvcli", "kernels", "profiles") else "")


def _git(folder: Path, *args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
