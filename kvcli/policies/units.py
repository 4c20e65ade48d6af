"""Scores of neighbours: smoothed over positions, or shared by the tokens of a chunk.

Slot order means nothing, so neighbours are found by position. Scores are [K, S] beside positions [K, S] below n, -1 =
empty; what comes back stands where its slot does.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Pooling = Literal["max", "avg"]


def by_position(values: Tensor, pos: Tensor, n: int, fill: float) -> Tensor:
    """[K, S] -> [K, n] in the order of the text; `fill` where a head stores nothing."""
    out = values.new_full((pos.shape[0], n + 1), fill)
    return out.scatter_(1, _index(pos, n), values)[:, :n]  # empty slots fall behind the end


def pooled(score: Tensor, pos: Tensor, n: int, width: int, kind: Pooling) -> Tensor:
    """Each score becomes the maximum or the mean over `width` (odd) positions around it, of those that are stored."""
    if width == 1 or not n:
        return score
    row = by_position(score, pos, n, -torch.inf if kind == "max" else 0.0).unsqueeze(1)
    if kind == "max":
        row = functional.max_pool1d(row, width, 1, width // 2)
    else:
        held = by_position(torch.ones_like(score), pos, n, 0.0).unsqueeze(1)
        row, held = (functional.avg_pool1d(t, width, 1, width // 2) for t in (row, held))
        row = row / held.clamp_min(torch.finfo(score.dtype).tiny)
    return row.squeeze(1).gather(1, pos.clamp(min=0).long())


def chunked(score: Tensor, pos: Tensor, n: int, size: int, among: Tensor) -> Tensor:
    """Each score becomes the mean of its chunk: `size` positions from a multiple of it on (ChunkKV, arXiv 2502.00299).

    Only slots `among` [K, S] count, and those outside keep their own score.
    """
    if size == 1:
        return score
    count = n // size + 1
    chunk = _index(pos.where(among, -1) // size, count)  # -1 // size is -1
    zero = score.new_zeros(pos.shape[0], count + 1)
    total = zero.scatter_add(1, chunk, score.where(among, 0.0))
    held = zero.scatter_add(1, chunk, among.to(score.dtype))
    return (total / held.clamp_min(1)).gather(1, chunk).where(among, score)


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norm(x: Tensor) -> Tensor:
    """Length of each of [K, S, D] -> [K, S]."""
    x = wide(x)
    return (x * x).sum(2).sqrt()


def _index(pos: Tensor, past: int) -> Tensor:
    """Positions to scatter to; empty slots go to `past`."""
    return pos.where(pos >= 0, past).long()
