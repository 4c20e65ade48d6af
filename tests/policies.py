"""Policies for tests: one that keeps all, one that keeps a window, one that keeps different slots in each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kv.slots import Slots


@dataclass(frozen=True)
class KeepAll:
    recent: int = 0

    def keep(self, layer: int, q: Tensor, s: Slots, kinds: Tensor) -> Tensor:
        return s.pos >= 0


@dataclass(frozen=True)
class Recent:
    sinks: int = 2
    last: int = 13
    recent: int = 0

    def keep(self, layer: int, q: Tensor, s: Slots, kinds: Tensor) -> Tensor:
        newest = s.pos.amax(dim=1, keepdim=True)
        return (s.pos >= 0) & ((s.pos < self.sinks) | (s.pos > newest - self.last))


@dataclass(frozen=True)
class Ragged:
    """Head j keeps the 9 + 4 j slots that the latest queries like most, and the last 5: unequal heads."""

    recent: int = 6

    def keep(self, layer: int, q: Tensor, s: Slots, kinds: Tensor) -> Tensor:
        assert q.shape[1] == min(self.recent, q.shape[1])
        n_kv = s.k.shape[0]
        rows = q.reshape(n_kv, -1, q.shape[2]).to(s.k.dtype)  # [K, G*w, D]
        score = (rows @ s.k.transpose(1, 2)).amax(1).masked_fill(s.pos < 0, -torch.inf)  # [K, S]
        newest = s.pos.amax(dim=1, keepdim=True)
        mask = s.pos > newest - 5
        for j in range(n_kv):
            best = score[j].topk(min(9 + 4 * j, score.shape[1])).indices
            mask[j, best] = True
        return mask & (s.pos >= 0)
