"""Attention of one layer over slots in few bits against bf16: CPU times of the kernel, sides by turns; last line JSON.

python tests/bench/attend_quantized.py [--slots 8192,32768] [--rows 1,8] [--groups 1,3,4] [--sizes 64,128]
    [--sides k8v8,k4v4] [--group 64] [--level avx2] [--seconds 1] [--out FILE]

Random numbers, one thread, over copies that do not fit the caches. Below each name: how many times as fast as bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.kernels.attend_invariant import QuantizedKV, StoredKV, attend_part, attend_quantized_part
from kvcli.kernels.attend_quantized import PackedHead
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kernels.quantize_kv import pack_keys, pack_values
from tests.bench.attend_invariant import interleaved
from tests.bench.harness import machine

BYTES = 96 << 20  # of the bf16 slots in all copies
HEADS = 4  # KV heads


def packed(k: torch.Tensor, v: torch.Tensor, side: str, group: int) -> QuantizedKV:
    bits, slots = (int(side[1]), int(side[3])), k.shape[1]
    pairs = zip(k, v, strict=True)
    made = [PackedHead(pack_keys(a, bits[0], group), a[:0], pack_values(b, bits[1], group), slots) for a, b in pairs]
    return QuantizedKV(made, torch.arange(slots, dtype=torch.int32), [0] * HEADS)


def main() -> None:
    ask = argparse.ArgumentParser()
    for name, usual in (("slots", "8192,32768"), ("rows", "1,8"), ("groups", "1,3,4"), ("sizes", "64,128")):
        ask.add_argument(f"--{name}", default=usual)
    ask.add_argument("--sides", default="k8v8,k4v4,k4v2,k2v2")
    ask.add_argument("--group", type=int, default=64, help="slots, and numbers of a value, that share a scale")
    ask.add_argument("--level")
    ask.add_argument("--seconds", type=float, default=1.0, help="for each line")
    ask.add_argument("--out", type=Path)
    args = ask.parse_args()
    torch.set_num_threads(1)
    names, table = args.sides.split(","), []
    for d, slots in ((d, s) for d in map(int, args.sizes.split(",")) for s in map(int, args.slots.split(","))):
        copies = [[torch.randn(HEADS, slots, d).bfloat16() for _ in "kv"] for _ in range(2 + BYTES // (16 * slots * d))]
        runs = {name: [packed(k, v, name, args.group) for k, v in copies] for name in names}
        starts, asks = range(0, HEADS * slots, slots), {"level": args.level}
        for g, n in ((g, n) for g in map(int, args.groups.split(",")) for n in map(int, args.rows.split(","))):
            q, pos = torch.randn(HEADS * g, n, d).bfloat16(), range(slots, slots + n)

            def dense(turn: int, q: torch.Tensor = q, pos: range = pos) -> PartialAttention:
                k, v = copies[turn % len(copies)]  # noqa: B023
                run = StoredKV(k.flatten(0, 1), v.flatten(0, 1), torch.empty(0), starts, [slots] * HEADS, starts)  # noqa: B023
                return attend_part(q, run, pos, q.shape[2] ** -0.5, **asks)  # noqa: B023

            def few(name: str, q: torch.Tensor = q, pos: range = pos) -> Callable[[int], PartialAttention]:
                mine = runs[name]  # noqa: B023
                return lambda turn: attend_quantized_part(q, mine[turn % len(mine)], pos, q.shape[2] ** -0.5, **asks)  # noqa: B023

            took = interleaved({"bf16": dense} | {name: few(name) for name in names}, args.seconds)
            ratios = {name: median(a / b for a, b in zip(took["bf16"], took[name], strict=True)) for name in names}
            row = {"size": d, "slots": slots, "query_heads": g, "rows": n, "bf16_ms": median(took["bf16"])} | ratios
            table.append({name: round(x, 3) for name, x in row.items()})
            print("  ".join(f"{name} {x:g}" for name, x in table[-1].items()), flush=True)
    found = {"schema": "kvcli.bench.attend_packed/1", "environment": machine(), "group": args.group, "rows": table}
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
