"""How long the first call of each fused op takes, in which Triton compiles it: all at once, a process for each.

What is made lies in Triton's cache, so that stages behind this one are spared it; what lay there before took no time.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.gpu.call import at_once, called
from tests.gpu.ops import OURS
from tests.gpu.stage import On, Row

ROWS = (1, 32)  # for tiles of 16 rows and of 32


def run(on: On) -> Iterator[Row]:
    jobs = [("rms_norm", 1), ("append_kv", 1)] if on.is_tiny else [(op, n) for op in OURS for n in ROWS]
    size, faults, first = "tiny" if on.is_tiny else "whole", 0, list[float]()

    def made(job: tuple[str, int]) -> Row:
        row, _ = called(*job, on.device, size, on.left)  # one that waited for a core ends in time as well
        return {"op": job[0], "rows": job[1], **row}

    for row in at_once(jobs, made):
        faults, first = faults + ("fault" in row), [*first, row.get("first", 0.0)]
        yield row
    yield {"says": f"{len(jobs)} forms, the slowest in {max(first):.1f} s, all in {sum(first):.0f} s; {faults} faults"}
