"""Which chunks of a text the model that writes looks at, as its last accepted token saw them (SpecExtend's cross-model
retrieval, arXiv 2505.20776).

The paper makes the last layer dense in every pass that is to score, all rows of it over the whole text. Here the pass
is what it always is, and one row's softmax is taken afterwards over the keys that are stored anyway: no more memory
than a row needs, in whatever form they are stored, and no bit of the pass depends on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.attention_mass import attention_mass
from kvcli.kv.slots import AttentionParams, KVCache

STAYS = 1.1  # a chunk that is held goes for one that is looked at so many times as much


@dataclass(frozen=True, slots=True)
class Query:
    """Of one accepted row, by layer."""

    of: Mapping[int, Tensor]  # [H, 1, D]
    at: int  # its position


def relevance(kv: KVCache, sights: Mapping[int, AttentionParams], query: Query, first: int, size: int) -> list[float]:
    """Attention that the row gives to each whole chunk of `size` tokens behind the `first` tokens, over all heads of
    the layers in `sights`. What the store does not show has none."""
    n = max(0, query.at + 1 - first) // size
    total: Tensor | None = None
    for layer, sight in sights.items():
        s, q = kv.slots(layer), query.of[layer]
        at = torch.tensor([query.at], device=q.device)
        mass = attention_mass(q, at, s.k, s.pos, sight.scale, softcap=sight.softcap, window=sight.window)  # [K, S]
        chunk = (s.pos - first).div(size, rounding_mode="floor").long()
        chunk = chunk.where((chunk >= 0) & (chunk < n), n)  # what is in none goes to one more
        if total is None:
            total = mass.new_zeros(n + 1)
        total.index_add_(0, chunk.flatten(), mass.flatten())
    return [] if total is None else total[:n].tolist()


def best(score: Sequence[float], among: Sequence[int], held: Collection[int], most: int) -> list[int]:
    """The `most` chunks that are looked at most, in that order; of several looked at alike the newest come first."""

    def worth(chunk: int) -> tuple[float, int]:
        seen = score[chunk] if chunk < len(score) else 0.0
        return seen * (STAYS if chunk in held else 1.0), chunk

    return sorted(among, key=worth, reverse=True)[:most]
