"""From how many rows on is it cheaper to unpack a layer that torch multiplies packed? Ratios; last line JSON.

python tests/bench/linear_quantized.py [--size 4096] [--threads 2] [--cpu-time]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.kernels.linear_quantized import Bits, QuantizedWeight, cpu, group_of, reference

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)
COPIES = 4  # weights in turn, so that they come from memory


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--size", type=int, default=4096)
    ask.add_argument("--threads", type=int, default=2)
    ask.add_argument("--reps", type=int, default=5)
    ask.add_argument("--cpu-time", action="store_true", help="count CPU seconds: on a shared machine, with --threads 1")
    args = ask.parse_args()
    torch.set_num_threads(args.threads)
    dense = [torch.randn(args.size, args.size).to(torch.bfloat16) for _ in range(COPIES)]
    eight, four = [packed(w, 8) for w in dense], [packed(w, 4) for w in dense]
    table = []
    print("rows   bf16 ms   int8  int8 unpacked   int4  int4 unpacked   (times bf16)")
    for rows in ROWS:
        x = torch.randn(rows, args.size).to(torch.bfloat16)
        runs: dict[str, Callable[[int], object]] = {
            "bf16": lambda i, x=x: F.linear(x, dense[i]),
            "int8": lambda i, x=x: torch.ops.aten._weight_int8pack_mm(x, eight[i].data, eight[i].scale),
            "int8_unpacked": lambda i, x=x: cpu._many8(x, eight[i].data, eight[i].scale),
            "int4": lambda i, x=x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, four[i].data, 128, four[i].scale),
            "int4_unpacked": lambda i, x=x: cpu._many4(x, four[i].group, four[i].data, four[i].scale),
        }
        best = interleaved(list(runs.values()), args.reps, time.process_time if args.cpu_time else time.perf_counter)
        row = {"rows": rows, "bf16_ms": round(best[0] * 1e3, 3)}
        row |= {name: round(t / best[0], 2) for name, t in zip(runs, best, strict=True) if name != "bf16"}
        table.append(row)
        print("{rows:4} {bf16_ms:9} {int8:6} {int8_unpacked:14} {int4:6} {int4_unpacked:14}".format(**row), flush=True)
    print(json.dumps({"size": args.size, "threads": args.threads, "torch": torch.__version__, "table": table}))


def packed(w: torch.Tensor, bits: Bits) -> QuantizedWeight:
    """As torch's kernels want it, where ours run too."""
    group = 0 if bits == 8 else group_of(w.shape[1])
    q, scale = reference.round8(w) if bits == 8 else reference.round4(w, group)
    return QuantizedWeight(bits, group, (w.shape[0], w.shape[1]), q if bits == 8 else cpu.pack4(q), scale, True)


def interleaved(runs: list[Callable[[int], object]], reps: int, clock: Callable[[], float]) -> list[float]:
    """Best seconds of each, taken in turns, so that another program's load falls on all of them."""
    best = [float("inf")] * len(runs)
    for _ in range(reps):
        for i, run in enumerate(runs):
            start = clock()
            for copy in range(COPIES):
                run(copy)
            best[i] = min(best[i], (clock() - start) / COPIES)
    return best


if __name__ == "__main__":
    main()
