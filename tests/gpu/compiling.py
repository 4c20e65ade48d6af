"""How long the first call of each fused op takes, in which Triton compiles it: all at once, a process for each.

What is made lies in Triton's cache, so that stages behind this one are spared it; what lay there before took no time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from tests.gpu.call import called
from tests.gpu.ops import OURS
from tests.gpu.stage import On, Row

AT_ONCE = 16  # processes: each takes half a gigabyte of the device
ROWS = (1, 32)  # for tiles of 16 rows and of 32


def run(on: On) -> Iterator[Row]:
    jobs = [("rms_norm", 1), ("append", 1)] if on.is_tiny else [(op, n) for op in OURS for n in ROWS]
    size, faults, first = "tiny" if on.is_tiny else "whole", 0, []
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        # one that waits for a core ends in time as well
        under_way = {pool.submit(lambda op=op, n=n: called(op, n, on.device, size, on.left)): (op, n) for op, n in jobs}
        for done in as_completed(under_way):
            op, n = under_way[done]
            row, _ = done.result()
            faults, first = faults + ("fault" in row), [*first, row.get("first", 0.0)]
            yield {"op": op, "rows": n, **row}
    yield {"says": f"{len(jobs)} forms, the slowest in {max(first):.1f} s, all in {sum(first):.0f} s; {faults} faults"}
