"""One layer with the weights of a GGUF file on the CPU: passes of several rows, in passes of one row.

python tests/bench/gguf_rows.py [--types Q4_K,Q6_K,Q8_0] [--rows 1,2,4,8,16] [--threads 1] [--before LIBRARY]

Only the kernel is called, over copies that do not fit the caches. `before` is the library of another checkout, whose
kernel takes turns with this one: `times` says how many times as fast this one is.
"""

from __future__ import annotations

import ctypes
import sys
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.kernels.native import Native, native
from kvcli.models.gguf.blocks import PACKED
from tests.bench.harness import Ints, Rows, Words, in_turns, measurement, quotients, seconds

BYTES = 96 << 20  # of all copies
SCALE = 0x2C  # both bytes of a float16 scale of 0.065, and a factor


@measurement("Products with the weights of GGUF files, by rows")
def gguf_rows(
    types: Words = ("Q4_K", "Q6_K", "Q8_0"),
    rows: Ints = (1, 2, 4, 8, 16),
    threads: int = 1,
    outputs: int = 4096,
    inputs: int = 2048,
    reps: int = 9,
    level: Annotated[str | None, "a lesser kind of CPU"] = None,
    before: Annotated[str | None, "library of another checkout"] = None,
) -> Rows:
    here = native(level)
    assert here is not None
    sides = {"now": here} | ({"before": Native(ctypes.CDLL(before), here.level)} if before else {})
    for side in sides.values():
        side.use_threads(threads)
    for kind in types:
        form = PACKED[kind].format
        nbytes = form.nbytes(outputs, inputs)
        copies = [
            (torch.randint(256, (nbytes[0],), dtype=torch.uint8), torch.full((nbytes[1],), SCALE, dtype=torch.uint8))
            for _ in range(1 + BYTES // sum(nbytes))
        ]
        xs = {m: torch.randn(m, inputs).bfloat16() for m in rows}
        y = torch.empty(max(rows), outputs, dtype=torch.bfloat16)

        def all_copies(side: Native, m: int) -> None:
            for w, scale in copies:  # noqa: B023
                at = (xs[m].data_ptr(), w.data_ptr(), scale.data_ptr(), y.data_ptr())  # noqa: B023
                side.linear_quantized(*at, m, outputs, inputs, form.address, False)  # noqa: B023

        runs = {
            (name, m): partial(seconds, partial(all_copies, side, m))
            for (name, side), m in product(sides.items(), rows)
        }
        took = in_turns(runs, reps)
        for m in rows:
            row = {"type": kind, "rows": m}
            row["GB/s"] = round(sum(nbytes) * len(copies) / median(took["now", m]) / 1e9, 2)
            for name in sides:
                row[f"{name}_of_1"] = round(median(quotients(took[name, m], took[name, rows[0]])), 2)
            yield row | ({"times": quotients(took["before", m], took["now", m], 2)} if before else {})


if __name__ == "__main__":
    gguf_rows.main()
