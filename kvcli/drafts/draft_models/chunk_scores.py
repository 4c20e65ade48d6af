"""Chunk scores: attention of the target model's last accepted token to each chunk of a sequence (SpecExtend's
cross-model retrieval, arXiv 2505.20776).

The paper makes the last layer dense in every scoring pass, for all rows over the whole sequence. Here the pass is
unchanged, and the softmax of one row is computed afterwards over the stored keys. This needs memory for one row only,
works with every KV format, and changes no bit of the pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.attention_mass import attention_mass
from kvcli.kv.slots import AttentionParams, KVCache

STAYS = 1.1  # a stored chunk is replaced by one with more than this multiple of its score


@dataclass(frozen=True, slots=True)
class Query:
    """Query vectors of one accepted row, by layer."""

    of: Mapping[int, Tensor]  # [H, 1, D]
    at: int  # position of the row


def relevance(
    kv: KVCache, attention_params: Mapping[int, AttentionParams], query: Query, first: int, size: int
) -> list[float]:
    """Return the attention mass of the row on each whole chunk of `size` tokens after the `first` tokens, summed over
    all heads of the layers in `attention_params`. Slots that are not in the cache have none."""
    n = max(0, query.at + 1 - first) // size
    total: Tensor | None = None
    for layer, sight in attention_params.items():
        s, q = kv.slots(layer), query.of[layer]
        at = torch.tensor([query.at], device=q.device)
        mass = attention_mass(q, at, s.k, s.pos, sight.scale, softcap=sight.softcap, window=sight.window)  # [K, S]
        chunk = (s.pos - first).div(size, rounding_mode="floor").long()
        chunk = chunk.where((chunk >= 0) & (chunk < n), n)  # slots outside of all chunks are summed in one more entry
        if total is None:
            total = mass.new_zeros(n + 1)
        total.index_add_(0, chunk.flatten(), mass.flatten())
    return [] if total is None else total[:n].tolist()


def best(score: Sequence[float], among: Sequence[int], held: Collection[int], most: int) -> list[int]:
    """Return the `most` chunks with the highest scores, best first; of equal ones the newest come first."""

    def worth(chunk: int) -> tuple[float, int]:
        seen = score[chunk] if chunk < len(score) else 0.0
        return seen * (STAYS if chunk in held else 1.0), chunk

    return sorted(among, key=worth, reverse=True)[:most]
