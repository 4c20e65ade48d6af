"""Seven heads made by hand, each with one habit, as attention maps that queries and keys reproduce exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.engine.sequence.state import PUNCT
from kvcli.kv.slots import Slots

SINKS = 4
NAMES = ("sink", "punct", "local", "heavy", "bursty", "far", "uniform")


def kinds(n: int) -> Tensor:
    """[n] int8: every ninth token is punctuation."""
    found = torch.zeros(n, dtype=torch.int8)
    found[8::9] = PUNCT
    return found


def maps(n: int, seed: int = 0) -> Tensor:
    """[7, n, n] float64: row i of each head spreads 1 over tokens 0 to i."""
    noise = torch.Generator().manual_seed(seed)
    row, token = torch.arange(n).view(-1, 1), torch.arange(n).view(1, -1)
    sink = (token < SINKS).expand(n, n)
    punct = (kinds(n) == PUNCT).expand(n, n)
    hitters = torch.zeros(n, dtype=torch.bool)
    hitters[torch.randperm(n // 3, generator=noise)[: n // 20] + SINKS] = True
    burst = (torch.rand(n, 1, generator=noise) < 0.12) & (row > n // 8)
    target = SINKS + (torch.rand(n, 1, generator=noise) * (row - SINKS).clamp(min=1)).long()
    on_target = (token == target) & burst
    habits = {
        "sink": [(sink, 0.98)],
        "punct": [(punct, 0.58), (sink, 0.4)],
        "local": [((row - token < 0.29 * n), 0.98)],
        "heavy": [(hitters.expand(n, n), 0.88), (sink, 0.1)],
        "bursty": [(sink, 0.98)],
        "far": [((row - token - n // 2).abs() < n // 32, 0.98)],
        "uniform": [],
    }
    heads = [_head(parts, row >= token) for parts in habits.values()]
    bursty = NAMES.index("bursty")
    heads[bursty] = torch.where(burst, 0.08 * heads[bursty] + 0.92 * on_target, heads[bursty])
    return torch.stack(heads)


def layer(attention: Tensor) -> tuple[Tensor, Slots]:
    """Queries [H, n, n] and slots of as many KV heads, with scores whose softmax is `attention` [H, n, n]."""
    h, n, _ = attention.shape
    k = torch.eye(n, dtype=torch.float32).expand(h, -1, -1)
    return attention.clamp(min=1e-30).log().float(), Slots(k, k, torch.arange(n).expand(h, -1))


def _head(parts: list[tuple[Tensor, float]], seen: Tensor) -> Tensor:
    """Each part's mass over its tokens, as far as there are any; what is left over all that is seen."""
    p = torch.zeros(seen.shape, dtype=torch.float64)
    for where, mass in parts:
        here = (where & seen).double()
        count = here.sum(1, keepdim=True)
        p += torch.where(count > 0, mass * here / count.clamp(min=1), 0.0)
    rest = 1 - p.sum(1, keepdim=True)
    return p + rest * seen / seen.sum(1, keepdim=True)
