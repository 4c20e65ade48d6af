"""Scores of neighbours: smoothed over positions, or shared by the tokens of a unit.

Slot order means nothing, so neighbours are found by position. Scores are [K, S] beside positions [K, S] below n, -1 =
empty; what comes back stands where its slot does.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.engine.sequence.token_kinds import END, SHOT

Pooling = Literal["max", "avg"]
Unit = int | Literal["sentence", "shot"]


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


def numbered(unit: Unit, kinds: Tensor, n: int, device: torch.device) -> Tensor:
    """[n]: which unit each position is of. So many tokens from a multiple on (ChunkKV, arXiv 2502.00299), a sentence up
    to what ends it (`kinds` [n]), or an example: what stands between blank lines or messages (ShotKV, 2502.01941).
    """
    pos = torch.arange(n, device=device)
    if unit == "sentence":
        ends = kinds.to(device) == END
        return torch.cat((pos[:1] * 0, (ends[:-1] & ~ends[1:]).long().cumsum(0)))  # "?!" ends one
    if unit == "shot":
        return (kinds.to(device) == SHOT).long().cumsum(0)
    return pos // unit


def chunked(score: Tensor, pos: Tensor, unit: Tensor, among: Tensor) -> Tensor:
    """Each score becomes the mean of its unit; `unit` [n] by position, rising.

    Only slots `among` [K, S] count, and those outside keep their own score.
    """
    if not unit.shape[0]:
        return score
    of, zero = _units(pos, unit, among), score.new_zeros(pos.shape[0], int(unit[-1]) + 2)
    total = zero.scatter_add(1, of, score.where(among, 0.0))
    held = zero.scatter_add(1, of, among.to(score.dtype))
    return (total / held.clamp_min(1)).gather(1, of).where(among, score)


def uncut(mask: Tensor, pos: Tensor, unit: Tensor, among: Tensor) -> Tensor:
    """The mask [K, S] without units of which some slots `among` would stay, and others go.

    A unit of more slots than a head keeps of them all stays cut: else a text of one unit would be gone.
    """
    if not unit.shape[0]:
        return mask
    of, zero = _units(pos, unit, among), torch.zeros(pos.shape[0], int(unit[-1]) + 2, device=pos.device)
    lost = zero.scatter_add(1, of, (among & ~mask).to(zero.dtype)).gather(1, of) > 0
    fits = zero.scatter_add(1, of, among.to(zero.dtype)).gather(1, of) <= (mask & among).sum(1, keepdim=True)
    return mask & ~(among & lost & fits)


def _units(pos: Tensor, unit: Tensor, among: Tensor) -> Tensor:
    """[K, S] unit of each slot; those outside have one of their own, behind the last."""
    found: Tensor = unit[pos.clamp(min=0).long()].masked_fill(~among, int(unit[-1]) + 1)
    return found


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
