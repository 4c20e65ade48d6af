"""Two calls of one fused op in a process of their own: `python -m tests.gpu.call OP ROWS DEVICE SIZE`.

SIZE is `whole` or `tiny`. Prints the seconds of the first call, in which Triton compiles, and of the second, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from tests.gpu.stage import On, Row, interpret_on_a_cpu

AT_ONCE = 16  # processes: each takes half a gigabyte of the device
Job = TypeVar("Job")


def at_once(jobs: Sequence[Job], do: Callable[[Job], Row]) -> Iterator[Row]:
    """What `do` gives of each, as they end; on as many cores as there are."""
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        for done in as_completed([pool.submit(do, job) for job in jobs]):
            yield done.result()


def called(
    op: str,
    rows: int,
    device: str,
    size: str,
    seconds: float,
    under: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> tuple[Row, str]:
    """What it prints, or `fault`, and all that was said. `under`: a command that runs the process; `env`: its whole
    environment, None = this one's."""
    command = [*under, sys.executable, "-m", "tests.gpu.call", op, str(rows), device, size]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, seconds), check=False, env=env)
    except subprocess.TimeoutExpired:
        return {"fault": f"ended after {seconds:.0f} s"}, ""
    said = done.stdout + done.stderr
    found = next((json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"first"')), None)
    return found or {"fault": f"its process ended with {done.returncode}: {said.strip()[-300:]}"}, said


def main(op: str, rows: str, device: str, size: str) -> None:
    interpret_on_a_cpu(On(device, 0))
    import torch

    from tests.gpu.clock import wait
    from tests.gpu.ops import OURS, TINY, Size

    noise = torch.Generator(device).manual_seed(0)
    call = OURS[op](TINY if size == "tiny" else Size(), noise).of(range(int(rows)))
    took = []
    for _ in range(2):
        wait(device)
        began = time.perf_counter()
        call()
        wait(device)
        took.append(round(time.perf_counter() - began, 4))
    print(json.dumps({"first": took[0], "again": took[1]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
