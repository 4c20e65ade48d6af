"""Slot budgets of heads: functions that divide one total among the heads of a layer or of the whole model.

Each function iterates over layers, given as scores and positions [K, S], and yields the slots to keep, bool [K, S]:
`each` slots per head on average, `most` = the most that one head can store. Protected slots score +inf and count
towards the budget. The arithmetic is in `selection.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kvcli.policies.scoring import selection

Scored = Iterable[tuple[Tensor, Tensor]]
Share = Callable[[Scored, int, int], Iterable[Tensor]]


def uniform(layers: Scored, each: int, most: int) -> Iterator[Tensor]:
    """Keep the same number of slots in every head."""
    return (selection.uniform(score, pos, each) for score, pos in layers)


def ada(layers: Scored, each: int, most: int, *, floor: float) -> Iterator[Tensor]:
    """Share a layer's budget among its heads by score (AdaKV, arXiv 2407.11550), each at least `floor` of average."""
    return (selection.ada(score, pos, each, floor) for score, pos in layers)


def pyramid(layers: Scored, each: int, most: int, *, beta: float, n_layers: int) -> Iterator[Tensor]:
    """Keep more slots in lower layers (PyramidKV, arXiv 2406.02069)."""
    for i, (score, pos) in enumerate(layers):
        yield selection.uniform(score, pos, selection.pyramid(n_layers, each, beta, most, _bound(score))[i])


def headmap(
    layers: Scored, each: int, most: int, *, heads: Sequence[Sequence[float]], floor: float
) -> Iterator[Tensor]:
    """Share the budget by the head weights of a file (HeadKV, arXiv 2410.19258; DuoAttention, 2410.10819)."""
    flat = [weight for row in heads for weight in row]
    for i, (score, pos) in enumerate(layers):
        counts = selection.by_weight(flat, each, floor, most, _bound(score))
        first = i * len(heads[i])
        yield selection.top(score, pos, torch.tensor(counts[first : first + len(heads[i])], device=pos.device))


def all_layers(layers: Scored, each: int, most: int, *, floor: float) -> Iterator[Tensor]:
    """Share one budget among all heads of all layers by score, as in KVzip (arXiv 2505.23416)."""
    held = [(selection.safe(score, pos, each, floor), pos) for score, pos in layers]
    flat, where = (torch.cat([t.flatten() for t in many]).unsqueeze(0) for many in zip(*held, strict=True))
    mask = selection.uniform(flat, where, sum(each * pos.shape[0] for _, pos in held))[0]
    parts = torch.split(mask, [pos.numel() for _, pos in held])
    return (part.view_as(pos) for part, (_, pos) in zip(parts, held, strict=True))


def prefix(layers: Scored, each: int, most: int) -> Iterator[Tensor]:
    """Keep slots with the same share of the score sum in every layer (PrefixKV, arXiv 2412.03409), heads equally."""
    held = list(layers)
    counts = selection.prefix(
        [_curve(score) for score, _ in held], each * len(held), max(map(_bound, (s for s, _ in held)))
    )
    return (selection.uniform(score, pos, count) for (score, pos), count in zip(held, counts, strict=True))


def _curve(score: Tensor) -> list[float]:
    """Return the share of a layer's score sum in its heads' best 1, 2, .. slots; protected slots count as 0."""
    best = score.masked_fill(~score.isfinite(), 0.0).double()
    best = best.gather(1, score.argsort(dim=1, descending=True)).sum(0).cumsum(0)
    return (best / best[-1].clamp_min(1e-300)).tolist() if len(best) else []


def _bound(score: Tensor) -> int:
    """Return the largest number of protected slots of any head."""
    return int((score == torch.inf).sum(1).max()) if score.numel() else 0
