"""Linear layers: the native kernels, torch's, and reading the same bytes. Milliseconds of one thread.

python tests/bench/linear.py [--shapes 4096x4096] [--rows 1,2,4] [--kinds bf16,int8,int4] [--levels all] [--reps 15]

CPU time, sides in turns, so that another program's load falls on all of them. Weights take turns as well, enough that
they come from memory. `reads` is the share of the bandwidth of a plain sum that the best native kernel reaches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.kernels import linear_quantized
from kvcli.kernels import native as built
from kvcli.kernels.linear import linear, pack
from kvcli.kernels.linear_blocked import block, linear_blocked
from kvcli.kernels.linear_quantized import cpu, group_of, reference
from kvcli.kernels.linear_quantized.formats import group_format
from tests.bench.harness import Ints, Rows, Words, in_turns, measurement, picked

FRESH = 128 << 20  # bytes of weights in turns, more than the caches hold
Side = Callable[[Tensor], object]


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
        ours = cycle(list(zip([linear_quantized.arrange_panels(c, bits) for c in q], scale, strict=True)))

        def native(level: str) -> Side:
            return lambda x: linear_quantized.linear(x, n, group_format(bits, group), *next(ours), level=level)

        sides: dict[str, Side] = {"torch": lambda x: cpu.linear(x, bits, group, *next(theirs))}
        return n * k * bits // 8 + scale[0].nbytes, sides | {level: native(level) for level in levels}

    return sides_of


def _rounded(w: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    return reference.round8(w) if bits == 8 else reference.round4(w, group)


SIDES = {"bf16": _bf16, "int8": _packed(8), "int4": _packed(4)}


@measurement("Milliseconds of linear layers on one thread")
def linears(
    shapes: Words = ("1024x1024", "4096x4096", "12288x4096", "4096x12288"),
    rows: Ints = (1, 2, 4, 8, 16, 64, 512),
    kinds: Words = ("bf16", "int8", "int4"),
    levels: Annotated[str, "all: lesser kinds of CPU too"] = "",
    reps: int = 15,
) -> Rows:
    torch.set_num_threads(1)
    assert built.levels(), built.why_not()
    chosen = built.levels() if levels == "all" else built.levels()[-1:]
    memory = torch.zeros(FRESH // 8, dtype=torch.int64)
    for shape, kind in product(shapes, picked(kinds, SIDES)):
        n, k = map(int, shape.split("x"))
        nbytes, sides = SIDES[kind](n, k, chosen)
        for m in rows:
            x = torch.randn(m, k).bfloat16()
            works = {"sum": lambda _: memory.sum(), **sides}
            turns = max(3, reps if m < 100 else reps // 4)
            found = in_turns({name: partial(cpu_seconds, work, x) for name, work in works.items()}, turns, 2)
            took = {name: median(each) for name, each in found.items()}
            whole = took.pop("sum") * nbytes / FRESH
            row = {"shape": shape, "kind": kind, "rows": m} | {s: round(t * 1e3, 3) for s, t in took.items()}
            best = took[chosen[-1]]
            yield row | {"gain": round(took["torch"] / best, 2), "reads": round(whole / best, 2)}


def cpu_seconds(work: Side, x: Tensor) -> float:
    start = time.thread_time()
    work(x)
    return time.thread_time() - start


if __name__ == "__main__":
    linears.main()
