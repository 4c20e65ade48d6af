"""Rates of this machine for slots in host memory, measured once per process, before the first answer over such slots.

They are measured only once, because access methods may round differently: two runs of one sequence must use the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from kvcli.kv.offload.host_access import CpuAttention, Rates
from kvcli.kv.offload.transfer import DeviceLink, bus_of
from kvcli.kv.slots import AttentionParams, Slots, alike, run_of
from kvcli.kv.tiers.disk import ExtentTier
from kvcli.kv.tiers.host import Mappings

HEADS, DIM, GROUP = 8, 128, 4
SLOTS = 1 << 14  # 64 MiB of bf16, more than most CPU caches hold
COPIED = 32 << 20  # bytes


@cache
def rates(device: torch.device) -> Rates:
    """Measure the rates of this device and host memory."""
    bus = bus_of(device)
    below = bus.staging(COPIED)
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)

    def copy() -> None:
        bus.copies.copy(there, below)
        bus.copies.record().synchronize()

    tier = ExtentTier(Mappings(alike(2, HEADS, DIM), torch.bfloat16, DeviceLink(torch.device("cpu"))))
    for layer, n in enumerate((SLOTS, 1)):
        kv = torch.randn(HEADS, n, DIM, dtype=torch.bfloat16)
        tier.take(layer, Slots(kv, kv, run_of(0, n, HEADS, kv.device)))
    q, params = torch.randn(HEADS * GROUP, 1, DIM, dtype=torch.bfloat16), AttentionParams(DIM**-0.5)
    query, far = CpuAttention(tier, bus), q.to(device)

    def round_trip() -> None:
        query.ask(1, far, params, [SLOTS])()
        bus.work.record().synchronize()

    attended = _seconds(lambda: tier.attend(0, q, params, [SLOTS]))
    return Rates(COPIED / _seconds(copy), 2 * HEADS * SLOTS * DIM * 2 / attended, _seconds(round_trip))


def _seconds(do: Callable[[], object], times: int = 5) -> float:
    """Return the shortest time of several calls, in seconds."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        do()
        found.append(time.perf_counter() - began)
    return min(found)
