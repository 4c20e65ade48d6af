"""`kvcli summarize --on ray`: forty documents, a worker that is killed, and an empty file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvcli import demo

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("n", [6, 40])
def test_results_come_in_order_and_a_dead_worker_s_document_is_done_again(tmp_path: Path, n: int) -> None:
    text = Path(demo.__file__).with_name("report.md").read_text(encoding="utf-8")
    head, *sections = re.split(r"(?m)^(?=## Section )", text)
    names = [f"doc{i:02}.md" for i in range(n)]
    for i, name in enumerate(names):
        (tmp_path / name).write_text(f"{head.splitlines()[0]}\n\n{sections[i % len(sections)][:700]}")
    (tmp_path / names[3]).write_bytes(b"")
    env = {**os.environ, "HOME": str(tmp_path), "KVCLI_HOME": str(tmp_path / "kv"), "RAY_AUTH_MODE": "disabled"}
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": "/tmp", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.getcwd()}
    args = [*names, "--each", "--on", "ray", "--parallel", "2", "-m", "demo", "--json"]
    command = [sys.executable, "-m", "kvcli", "summarize", *args]
    found: list[dict] = []
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout or ():
            found.append(json.loads(line))  # nothing of Ray's own is among the results
            if len(found) == 3:
                below = psutil.Process(run.pid).children(recursive=True)
                worker = next(one for one in below if "ray::Worker" in " ".join(one.cmdline()))
                os.kill(worker.pid, signal.SIGKILL)
    assert run.returncode == 3
    assert found[0]["code"] == "empty_file"
    assert [one["source"]["path"] for one in found[1:]] == [name for name in names if name != names[3]]
    assert all(one["points"] for one in found[1:])
