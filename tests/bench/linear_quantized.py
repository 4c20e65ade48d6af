"""From how many rows on is it cheaper to unpack a layer that torch multiplies packed? Ratios.

python tests/bench/linear_quantized.py [--size 4096] [--threads 2] [--cpu-time]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.kernels.linear_quantized import Bits, QuantizedWeight, cpu, group_of, reference
from kvcli.kernels.linear_quantized.formats import group_format
from tests.bench.harness import Rows, in_turns, measurement

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)
COPIES = 4  # weights in turn, so that they come from memory


def packed(w: torch.Tensor, bits: Bits) -> QuantizedWeight:
    """As torch's kernels want it, where ours run too."""
    group = 0 if bits == 8 else group_of(w.shape[1])
    q, scale = reference.round8(w) if bits == 8 else reference.round4(w, group)
    data, shape = q if bits == 8 else cpu.pack4(q), (w.shape[0], w.shape[1])
    return QuantizedWeight(group_format(bits, group), shape, data, scale, True)


@measurement("Packed layers by rows, times bf16")
def linear_quantized(
    size: int = 4096,
    threads: int = 2,
    reps: int = 5,
    cpu_time: Annotated[bool, "count CPU seconds: on a shared machine, with --threads 1"] = False,
) -> Rows:
    torch.set_num_threads(threads)
    clock = time.process_time if cpu_time else time.perf_counter
    dense = [torch.randn(size, size).to(torch.bfloat16) for _ in range(COPIES)]
    eight, four = [packed(w, 8) for w in dense], [packed(w, 4) for w in dense]

    def once(run: Callable[[int], object]) -> float:
        start = clock()
        for copy in range(COPIES):
            run(copy)
        return (clock() - start) / COPIES

    for rows in ROWS:
        x = torch.randn(rows, size).to(torch.bfloat16)
        runs: dict[str, Callable[[int], object]] = {
            "bf16": lambda i, x=x: F.linear(x, dense[i]),
            "int8": lambda i, x=x: torch.ops.aten._weight_int8pack_mm(x, eight[i].data, eight[i].scale),
            "int8_unpacked": lambda i, x=x: cpu._many8(x, eight[i].data, eight[i].scale),
            "int4": lambda i, x=x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, four[i].data, 128, four[i].scale),
            "int4_unpacked": lambda i, x=x: cpu._many4(x, four[i].group, four[i].data, four[i].scale),
        }
        found = in_turns({name: partial(once, run) for name, run in runs.items()}, reps, 0)
        best = {name: min(each) for name, each in found.items()}
        row = {"rows": rows, "bf16_ms": round(best.pop("bf16") * 1e3, 3)}
        yield row | {name: round(t / min(found["bf16"]), 2) for name, t in best.items()}


if __name__ == "__main__":
    linear_quantized.main()
