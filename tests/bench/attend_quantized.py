"""Attention of one layer over slots in few bits against bf16: CPU times of the kernel, sides by turns.

python tests/bench/attend_quantized.py [--slots 8192,32768] [--rows 1,8] [--groups 1,3,4] [--sizes 64,128]
    [--sides k8v8,k4v4] [--group 64] [--level avx2] [--seconds 1] [--out FILE]

Random numbers, one thread, over copies that do not fit the caches. Below each name: how many times as fast as bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.kernels.attend_invariant import QuantizedKV, StoredKV, attend_part, attend_quantized_part
from kvcli.kernels.attend_quantized import PackedHead
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kernels.quantize_kv import pack_keys, pack_values
from tests.bench.attend_invariant import interleaved
from tests.bench.harness import Ints, Rows, Words, measurement

BYTES = 96 << 20  # of the bf16 slots in all copies
HEADS = 4  # KV heads


def packed(k: torch.Tensor, v: torch.Tensor, side: str, group: int) -> QuantizedKV:
    bits, slots = (int(side[1]), int(side[3])), k.shape[1]
    pairs = zip(k, v, strict=True)
    made = [PackedHead(pack_keys(a, bits[0], group), a[:0], pack_values(b, bits[1], group), slots) for a, b in pairs]
    return QuantizedKV(made, torch.arange(slots, dtype=torch.int32), [0] * HEADS)


@measurement(
    "Attention of one layer over slots in few bits, times as fast as over bf16", schema="kvcli.bench.attend_packed/1"
)
def attend_quantized(
    slots: Ints = (8192, 32768),
    rows: Ints = (1, 8),
    groups: Ints = (1, 3, 4),
    sizes: Ints = (64, 128),
    sides: Words = ("k8v8", "k4v4", "k4v2", "k2v2"),
    group: Annotated[int, "slots, and numbers of a value, that share a scale"] = 64,
    level: str | None = None,
    seconds: Annotated[float, "for each line"] = 1.0,
) -> Rows:
    torch.set_num_threads(1)
    for d, n_slots in product(sizes, slots):
        copies = [
            [torch.randn(HEADS, n_slots, d).bfloat16() for _ in "kv"] for _ in range(2 + BYTES // (16 * n_slots * d))
        ]
        runs = {name: [packed(k, v, name, group) for k, v in copies] for name in sides}
        starts, asks = range(0, HEADS * n_slots, n_slots), {"level": level}
        for g, n in product(groups, rows):
            q, pos = torch.randn(HEADS * g, n, d).bfloat16(), range(n_slots, n_slots + n)

            def dense(turn: int, q: torch.Tensor = q, pos: range = pos) -> PartialAttention:
                k, v = copies[turn % len(copies)]  # noqa: B023
                run = StoredKV(k.flatten(0, 1), v.flatten(0, 1), torch.empty(0), starts, [n_slots] * HEADS, starts)  # noqa: B023
                return attend_part(q, run, pos, q.shape[2] ** -0.5, **asks)  # noqa: B023

            def few(name: str, q: torch.Tensor = q, pos: range = pos) -> Callable[[int], PartialAttention]:
                mine = runs[name]  # noqa: B023
                return lambda turn: attend_quantized_part(q, mine[turn % len(mine)], pos, q.shape[2] ** -0.5, **asks)  # noqa: B023

            took = interleaved({"bf16": dense} | {name: few(name) for name in sides}, seconds)
            ratios = {name: median(a / b for a, b in zip(took["bf16"], took[name], strict=True)) for name in sides}
            row = {"size": d, "slots": n_slots, "query_heads": g, "rows": n, "bf16_ms": median(took["bf16"])} | ratios
            yield {name: round(x, 3) for name, x in row.items()}
    return {"group": group}


if __name__ == "__main__":
    attend_quantized.main()
