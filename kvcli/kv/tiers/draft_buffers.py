"""KV of one draft tree at a time, in buffers that captured passes find at the same addresses for tree after tree."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import pad

ROOM = 128  # rows: twice those of a captured pass


class DraftBuffers:
    """Keys and values of the rows of a draft tree, by layer that stores."""

    def __init__(self, empty: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """`empty`: k [K, 0, D], v [K, 0, E] of the layers that store; one tensor if they are equal (MLA)."""
        self.kv = _padded(empty, ROOM)  # k [K, room, D], v [K, room, E]

    @property
    def room(self) -> int:
        """Rows for which there is capacity."""
        return next(iter(self.kv.values()))[0].shape[1]

    def grown(self, n: int) -> DraftBuffers:
        """Return these buffers, or larger ones with the same rows, with capacity for n rows."""
        if (more := n - self.room) <= 0:
            return self
        new = copy(self)
        new.kv = _padded(self.kv, more)
        return new

    def put(self, layer: int, k: Tensor, v: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Write rows k [K, N, D], v [K, N, E] from row `first` [1] on, without the host. Return the buffers."""
        at = first.long() + torch.arange(k.shape[1], device=k.device)
        for there, new in zip(self.kv[layer], (k, v), strict=True):
            there.index_copy_(1, at, new)
        return self.kv[layer]


def _padded(kv: Mapping[int, tuple[Tensor, Tensor]], more: int) -> dict[int, tuple[Tensor, Tensor]]:
    found = {}
    for layer, (k, v) in kv.items():
        wide = pad(k, (0, 0, 0, more))
        found[layer] = wide, wide if v is k else pad(v, (0, 0, 0, more))
    return found
