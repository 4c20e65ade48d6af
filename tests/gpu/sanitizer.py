"""Fused ops under compute-sanitizer: what they read or write beyond their tensors, and races in shared memory.

It comes with the CUDA toolkit. Where it is not, or there is no GPU, this says so.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from itertools import product

from tests.gpu.call import at_once, called
from tests.gpu.stage import On, Row

NAME = "compute-sanitizer"
PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
TOOLS = ("memcheck", "racecheck")
OPS = (  # those that reach what they read by tables and limits
    "attend_invariant",
    "attend, limits",
    "attend_quantized, 4 bits",
    "append_kv",
    "linear_skinny, int4",
    "attention_mass",
)
ROWS = 3


def binary() -> str | None:
    return shutil.which(NAME) or shutil.which(NAME, path=":".join(PLACES))


def checked(tool: str, path: str, op: str, on: On, seconds: float) -> Row:
    """`errors` of one op, and where the first ones are."""
    # each tensor in memory of its own, or what lies behind it would be another's
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    row, said = called(op, ROWS, on.device, "tiny", seconds, (path, "--tool", tool, "--print-limit", "5"), env)
    count = re.search(r"SUMMARY: (\d+) (?:error|hazard)", said)
    if count is None:
        return {"op": op, "tool": tool, "fault": row.get("fault") or f"{NAME} gave no summary: {said.strip()[-300:]}"}
    where = [line.strip("= ") for line in said.splitlines() if line.startswith("=") and " at " in line]
    return {"op": op, "tool": tool, "errors": int(count[1]), "where": where[:5]}


def run(on: On) -> Iterator[Row]:
    path = binary()
    why = "" if path else f"no {NAME} on PATH or in {' or '.join(PLACES)}; it comes with the CUDA toolkit"
    if path is None or on.is_tiny:
        yield {"not_run": why or "there is no GPU", "says": f"not run: {why or 'there is no GPU'}"}
        return
    rows = at_once([*product(TOOLS, OPS)], lambda job: checked(job[0], path, job[1], on, on.left))
    clean = 0
    for row in rows:
        yield row
        clean += row.get("errors") == 0
    yield {"says": f"{clean} of {len(TOOLS) * len(OPS)} clean"}
