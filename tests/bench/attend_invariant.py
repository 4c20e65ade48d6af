"""Attention in one call against torch's kernels and their merge: ratios, measured side by side.

python tests/bench/attend_invariant.py [--heads 8] [--group 4] [--size 128] [--slots 512,4096] [--level avx2] [--prompt]

One layer, bf16, one thread, its CPU seconds: best of each, taken in turns, over copies that do not fit the caches.
Rows are a tree's as drafts make them, or one; --prompt: 512 of a chunk, behind as many slots as are given.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.kernels.attend import attend
from kvcli.kernels.attend_invariant import StoredKV, attend_invariant
from kvcli.kernels.attend_new_tokens import attend_new_tokens
from kvcli.kernels.merge_attention import merge_attention
from tests.bench.harness import Ints, Rows, measurement

BYTES = 96 << 20  # of stored slots, in all copies


def interleaved(sides: dict[str, Callable[[int], object]], seconds: float) -> dict[str, list[float]]:
    """CPU milliseconds of each side, in turns, until so many seconds are over."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    until = time.monotonic() + seconds
    turn = -1  # the first is not counted
    while turn < 5 or time.monotonic() < until:
        for name, side in sides.items():
            start = time.thread_time()
            side(turn)
            if turn >= 0:
                took[name].append((time.thread_time() - start) * 1e3)
        turn += 1
    return took


def binary_tree(n: int) -> Tensor:
    """[n, n]: who sees whom where each row has two children."""
    sees = torch.eye(n, dtype=torch.bool)
    for i in range(1, n):
        sees[i] |= sees[(i - 1) // 2]
    return sees


@dataclass(frozen=True)
class Layer:
    """Rows of a tree or of a chunk, behind copies of the same number of slots."""

    stored: list[list[Tensor]]  # k and v [K, S, D] of each copy
    q: Tensor  # [H, N, D]
    k: Tensor  # [K, N, D]
    v: Tensor
    sees: Tensor | None
    level: str | None

    def torch(self, turn: int) -> Tensor:
        past = self.stored[turn % len(self.stored)]
        fresh = attend_new_tokens(self.q, self.k, self.v, self.scale, self.sees)
        return merge_attention([attend(self.q, *past, self.scale), fresh] if past[0].shape[1] else [fresh]).transpose(
            0, 1
        )

    def ours(self, turn: int) -> Tensor:
        k, v = self.stored[turn % len(self.stored)]
        kv, slots, d = k.shape
        starts = [j * slots for j in range(kv)]
        run = StoredKV(k.view(-1, d), v.view(-1, d), torch.empty(0), starts, [slots] * kv, starts)
        pos = range(slots, slots + self.q.shape[1])
        return attend_invariant(self.q, run, (self.k, self.v), pos, self.scale, sees=self.sees, level=self.level)

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)


@measurement("Attention in one call against torch's kernels and their merge")
def attend_in_one_call(
    heads: Annotated[int, "KV heads"] = 8,
    group: Annotated[int, "query heads of each"] = 4,
    size: Annotated[int, "of a head"] = 128,
    slots: Ints = (512, 4096, 16384, 32768),
    rows: Ints = (1, 8, 16),
    prompt: bool = False,
    level: str | None = None,
    seconds: Annotated[float, "for each line"] = 2.0,
) -> Rows:
    torch.set_num_threads(1)
    big = torch.zeros(1 << 25, dtype=torch.float64)
    for stored_slots in slots:
        nbytes = heads * stored_slots * size * 4
        copies = max(1, min(24, BYTES // max(1, nbytes)))
        stored = [[torch.randn(heads, stored_slots, size).bfloat16() for _ in "kv"] for _ in range(copies)]
        for m in (512,) if prompt else rows:
            q, k, v = (torch.randn(m, n, size).bfloat16().transpose(0, 1) for n in (heads * group, heads, heads))
            layer = Layer(stored, q, k, v, None if prompt or m == 1 else binary_tree(m), level)
            torch.testing.assert_close(layer.torch(0).bfloat16(), layer.ours(0), atol=2e-2, rtol=2e-2)
            took = interleaved({"torch": layer.torch, "ours": layer.ours, "read": lambda _: big.sum()}, seconds)
            best = {name: min(each) for name, each in took.items()}
            row = {"slots": stored_slots, "rows": m, "torch_ms": best["torch"], "ours_ms": best["ours"]}
            row["ratio"] = median(a / b for a, b in zip(took["torch"], took["ours"], strict=True))
            row |= {"gbps": nbytes / best["ours"] / 1e6, "memory_gbps": big.nbytes / best["read"] / 1e6}
            yield {name: round(x, 3) for name, x in row.items()}


if __name__ == "__main__":
    attend_in_one_call.main()
