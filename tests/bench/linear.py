"""Linear layers: the native kernels, torch's, and reading the same bytes. Milliseconds of one thread; last line JSON.

python tests/bench/linear.py [--shapes 4096x4096] [--rows 1,2,4] [--kinds bf16,int8,int4] [--levels all] [--reps 15]

CPU time, sides in turns, so that another program's load falls on all of them. Weights take turns as well, enough that
they come from memory. `reads` is the share of the bandwidth of a plain sum that the best native kernel reaches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.kernels import native as built
from kvcli.kernels.linear import linear, pack
from kvcli.kernels.linear_blocked import block, linear_blocked
from kvcli.kernels.linear_quantized import cpu, group_of, panels, reference

FRESH = 128 << 20  # bytes of weights in turns, more than the caches hold
Side = Callable[[Tensor], object]


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--shapes", default="1024x1024,4096x4096,12288x4096,4096x12288")
    ask.add_argument("--rows", default="1,2,4,8,16,64,512")
    ask.add_argument("--kinds", default="bf16,int8,int4")
    ask.add_argument("--levels", default="", help="all: lesser kinds of CPU too")
    ask.add_argument("--reps", type=int, default=15)
    args = ask.parse_args()
    torch.set_num_threads(1)
    assert built.levels(), built.why_not()
    levels = built.levels() if args.levels == "all" else built.levels()[-1:]
    memory = torch.zeros(FRESH // 8, dtype=torch.int64)
    table = []
    for shape in args.shapes.split(","):
        n, k = map(int, shape.split("x"))
        for kind in args.kinds.split(","):
            nbytes, sides = SIDES[kind](n, k, levels)
            for rows in map(int, args.rows.split(",")):
                x = torch.randn(rows, k).bfloat16()
                reps = max(3, args.reps if rows < 100 else args.reps // 4)
                took = in_turns({"sum": lambda x: memory.sum(), **sides}, x, reps)
                whole = took.pop("sum") * nbytes / FRESH
                row = {"shape": shape, "kind": kind, "rows": rows} | {s: round(t * 1e3, 3) for s, t in took.items()}
                row |= {"gain": round(took["torch"] / took[levels[-1]], 2), "reads": round(whole / took[levels[-1]], 2)}
                table.append(row)
                print(row, flush=True)
    print(json.dumps({"torch": torch.__version__, "levels": levels, "table": table}))


def in_turns(sides: dict[str, Side], x: Tensor, reps: int) -> dict[str, float]:
    """Median seconds of each."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(reps + 2):
        for name, side in sides.items():
            start = time.thread_time()
            side(x)
            took[name].append(time.thread_time() - start)
    return {name: statistics.median(times[2:]) for name, times in took.items()}


def _weights(n: int, k: int, nbytes: int) -> list[Tensor]:
    return [torch.randn(n, k).mul_(0.02).bfloat16() for _ in range(max(2, FRESH // nbytes))]


def _bf16(n: int, k: int, levels: tuple[str, ...]) -> tuple[int, dict[str, Side]]:
    weights = _weights(n, k, n * k * 2)
    theirs, ours = cycle([block(w) for w in weights]), cycle([pack(w) for w in weights])

    def native(level: str) -> Side:
        return lambda x: linear(x, next(ours), None, n, level=level)

    sides: dict[str, Side] = {"torch": lambda x: linear_blocked(x, next(theirs), None)}
    return n * k * 2, sides | {level: native(level) for level in levels}


def _packed(bits: int) -> Callable[[int, int, tuple[str, ...]], tuple[int, dict[str, Side]]]:
    def sides_of(n: int, k: int, levels: tuple[str, ...]) -> tuple[int, dict[str, Side]]:
        group = 0 if bits == 8 else group_of(k)
        q, scale = zip(*(_rounded(w, bits, group) for w in _weights(n, k, n * k * bits // 8)), strict=True)
        theirs = cycle(list(zip([c if bits == 8 else cpu.pack4(c) for c in q], scale, strict=True)))
        ours = cycle(list(zip([panels.arrange(c, bits) for c in q], scale, strict=True)))

        def native(level: str) -> Side:
            return lambda x: panels.linear(x, n, bits, group, *next(ours), level=level)

        sides: dict[str, Side] = {"torch": lambda x: cpu.linear(x, bits, group, *next(theirs))}
        return n * k * bits // 8 + scale[0].nbytes, sides | {level: native(level) for level in levels}

    return sides_of


def _rounded(w: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    return reference.round8(w) if bits == 8 else reference.round4(w, group)


SIDES = {"bf16": _bf16, "int8": _packed(8), "int4": _packed(4)}

if __name__ == "__main__":
    main()
