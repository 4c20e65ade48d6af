"""Bytes that the keys and values of one text take: all of them, half, a quarter, packed; as counted and as allocated.

    python tests/bench/kv_memory.py [--tokens 8192] [--chunk 1024] [--only full,keep50,...] [--out FILE]

The random bf16 Llama of 152M parameters reads a text, each side in a process of its own. "keep" is a policy that leaves
every head slots of its own, 0.4 to 1.6 times the share named, scattered over the text. Three figures a side: what the
store says it has allocated, what torch's live tensors hold more than before the text was read, and how much the
process has grown. Freed is what the side "full" has more.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvcli.engine.engine import run_to_end
from kvcli.engine.policy.policy import PerLayerPolicy
from tests import make
from tests.bench.harness import Rows, Words, alone, measurement, picked
from tests.bench.random_model import build, noise, opened, ours_of

GOLDEN = 0.6180339887498949  # its multiples are spread evenly, so every head keeps just its share
PACKED = {"k8v8": (8, 8), "k4v4": (4, 4), "k4v2": (4, 2)}  # bits of keys and values
RESIDUAL, GROUP, SINKS = 128, 64, 4  # slots that stay in full beside what is packed, and slots that are packed at once
SIDES = ("full", "keep50", "keep25", *PACKED)


@dataclass(frozen=True)
class Shares(PerLayerPolicy):
    """Head j of n keeps 2 (j + 1) / (n + 1) of `share`: unequal heads that keep `share` on average."""

    share: float

    def mask(self, s: Any, at: Any) -> torch.Tensor:
        n_kv = s.pos.shape[0]
        head = torch.arange(1, n_kv + 1).view(-1, 1)
        lot = (s.pos.double() * GOLDEN + 0.37 * head) % 1.0  # of a token, so what falls out early would not stay later
        return (lot < 2 * self.share * head / (n_kv + 1)) & (s.pos >= 0)


def store(lm: Any, side: str) -> Any:

    shape = lm.shapes, lm.dtype
    if side not in PACKED:
        return make.dense(lm)
    from kvcli.kv.cache.level import TierLevel
    from kvcli.kv.tiers.quantized import QuantizedTier

    k_bits, v_bits = PACKED[side]
    packed = QuantizedTier(*shape, lm.device, k_bits=k_bits, v_bits=v_bits, group=GROUP)
    return make.tiered(lm, TierLevel(packed), holds=RESIDUAL, group=GROUP, sinks=SINKS)


def live() -> int:
    """Bytes of all storages that a tensor in this process holds on to; oneDNN's blocked weights have none to show."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and not t.is_mkldnn]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def resident() -> int:
    """Bytes of the process, once the allocator has given back what is free."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def session(lm: Any, side: str, chunk: int) -> Any:
    policy = Shares(int(side.removeprefix("keep")) / 100) if side.startswith("keep") else None
    return opened(lm, store(lm, side), policy=policy, chunk=chunk, every=64)


def measure(side: str, n: int, chunk: int) -> dict[str, Any]:
    """In a process of its own: read a text of n tokens and look at what is left."""
    from kvcli.kv.slots import nbytes

    lm = ours_of(build())
    ids = noise(n)
    warm = session(lm, side, chunk)  # whatever is made once is made now
    run_to_end(warm.read(ids[: min(n, 2 * chunk)]))
    del warm
    before = live(), resident()
    one = session(lm, side, chunk)
    run_to_end(one.read(ids))
    after = live(), resident()
    held = [int((one.cache.slots(layer).pos >= 0).sum()) for layer in range(lm.n_layers)]
    return {
        "side": side,
        "slots": sum(held) / (lm.n_layers * lm.n_kv_heads * one.committed),
        "counted": sum(nbytes(one.cache).values()),
        "tensors": after[0] - before[0],
        "process": after[1] - before[1],
        "number": 2 * lm.n_kv_heads * lm.head_dim * lm.dtype.itemsize * lm.n_layers * one.committed,
    }


@measurement("Bytes of keys and values on a random 152M Llama", schema="kvcli.bench.kv_memory/1")
def kv_memory(
    tokens: int = 8192,
    chunk: int = 1024,
    only: Annotated[Words, "sides to measure; full comes first in any case"] = SIDES,
) -> Rows:
    picked(only, SIDES)
    full = alone(measure, "full", tokens, chunk)
    yield full
    for side in (side for side in SIDES if side in only and side != "full"):
        row = alone(measure, side, tokens, chunk)
        yield row | {
            "freed": {kind: round(1 - row[kind] / full[kind], 4) for kind in ("counted", "tensors", "process")}
        }
    return {"tokens": tokens}


if __name__ == "__main__":
    kv_memory.main()
