"""Scores of neighbouring tokens: pooled over positions, or averaged over the tokens of a unit.

Slots are in no order, so neighbours are found by position. Scores [K, S] come with positions [K, S] below n, -1 =
empty; results are in the order of the slots.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.engine.sequence.state import END, SHOT

Pooling = Literal["max", "avg"]
Unit = int | Literal["sentence", "shot"]


def by_position(values: Tensor, pos: Tensor, n: int, fill: float) -> Tensor:
    """Scatter [K, S] values to [K, n] by position; `fill` where a head stores no slot."""
    out = values.new_full((pos.shape[0], n + 1), fill)
    return out.scatter_(1, _index(pos, n), values)[:, :n]  # empty slots are written after the end and cut off


def pooled(score: Tensor, pos: Tensor, n: int, width: int, kind: Pooling) -> Tensor:
    """Replace each score by the maximum or mean over the stored slots among the `width` (odd) positions around it."""
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


def numbered(unit: Unit, kinds: Tensor, n: int, device: torch.device) -> Tensor:
    """Return the unit number of each position [n]. A unit is a fixed number of tokens (ChunkKV, arXiv 2502.00299), a
    sentence with its end marks (`kinds` [n]), or a shot: text between blank lines or messages (ShotKV, 2502.01941).
    """
    pos = torch.arange(n, device=device)
    if unit == "sentence":
        ends = kinds.to(device) == END
        return torch.cat((pos[:1] * 0, (ends[:-1] & ~ends[1:]).long().cumsum(0)))  # "?!" ends one sentence
    if unit == "shot":
        return (kinds.to(device) == SHOT).long().cumsum(0)
    return pos // unit


def chunked(score: Tensor, pos: Tensor, unit: Tensor, among: Tensor) -> Tensor:
    """Replace each score by the mean of its unit; `unit` [n] by position, rising.

    Only slots `among` [K, S] are averaged; the scores of other slots are unchanged.
    """
    if not unit.shape[0]:
        return score
    of, zero = _units(pos, unit, among), score.new_zeros(pos.shape[0], int(unit[-1]) + 2)
    total = zero.scatter_add(1, of, score.where(among, 0.0))
    held = zero.scatter_add(1, of, among.to(score.dtype))
    return (total / held.clamp_min(1)).gather(1, of).where(among, score)


def uncut(mask: Tensor, pos: Tensor, unit: Tensor, among: Tensor) -> Tensor:
    """Return the mask [K, S] without the units of which only a part of the slots `among` is kept.

    A unit with more slots than the head keeps in all may be kept in part: else a text of one unit would be evicted.
    """
    if not unit.shape[0]:
        return mask
    of, zero = _units(pos, unit, among), torch.zeros(pos.shape[0], int(unit[-1]) + 2, device=pos.device)
    lost = zero.scatter_add(1, of, (among & ~mask).to(zero.dtype)).gather(1, of) > 0
    fits = zero.scatter_add(1, of, among.to(zero.dtype)).gather(1, of) <= (mask & among).sum(1, keepdim=True)
    return mask & ~(among & lost & fits)


def _units(pos: Tensor, unit: Tensor, among: Tensor) -> Tensor:
    """Return the unit of each slot [K, S]; slots outside `among` get one extra unit after the last."""
    found: Tensor = unit[pos.clamp(min=0).long()].masked_fill(~among, int(unit[-1]) + 1)
    return found


def wide(x: Tensor) -> Tensor:
    """Convert to float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norm(x: Tensor) -> Tensor:
    """Return the L2 norm of each vector: [K, S, D] -> [K, S]."""
    x = wide(x)
    return (x * x).sum(2).sqrt()


def _index(pos: Tensor, past: int) -> Tensor:
    """Return the positions to scatter to; empty slots are sent to index `past`."""
    return pos.where(pos >= 0, past).long()
