"""Who gets how much: one total, shared by the heads of a layer or of the whole model.

Each takes layers one after the other, as scores and positions [K, S], and gives the slots that stay, bool [K, S]:
`each` a head on average, of `most` that a head can hold. What is protected scores +inf and counts. The arithmetic is in
`selection.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kvcli.policies.scoring import selection

Scored = Iterable[tuple[Tensor, Tensor]]
Share = Callable[[Scored, int, int], Iterable[Tensor]]


def uniform(layers: Scored, each: int, most: int) -> Iterator[Tensor]:
    """Every head keeps the same number."""
    return (selection.uniform(score, pos, each) for score, pos in layers)


def ada(layers: Scored, each: int, most: int, *, floor: float) -> Iterator[Tensor]:
    """The heads of a layer compete (AdaKV, arXiv 2407.11550); none goes below `floor` of the average."""
    return (selection.ada(score, pos, each, floor) for score, pos in layers)


def pyramid(layers: Scored, each: int, most: int, *, beta: float, n_layers: int) -> Iterator[Tensor]:
    """Lower layers keep more (PyramidKV, arXiv 2406.02069)."""
    for i, (score, pos) in enumerate(layers):
        yield selection.uniform(score, pos, selection.pyramid(n_layers, each, beta, most, _bound(score))[i])


def headmap(
    layers: Scored, each: int, most: int, *, heads: Sequence[Sequence[float]], floor: float
) -> Iterator[Tensor]:
    """Each head keeps what a file says that it deserves (HeadKV, arXiv 2410.19258; DuoAttention, 2410.10819)."""
    flat = [weight for row in heads for weight in row]
    for i, (score, pos) in enumerate(layers):
        counts = selection.by_weight(flat, each, floor, most, _bound(score))
        first = i * len(heads[i])
        yield selection.top(score, pos, torch.tensor(counts[first : first + len(heads[i])], device=pos.device))


def all_layers(layers: Scored, each: int, most: int, *, floor: float) -> Iterator[Tensor]:
    """All heads of all layers compete, as in KVzip (arXiv 2505.23416)."""
    held = [(selection.safe(score, pos, each, floor), pos) for score, pos in layers]
    flat, where = (torch.cat([t.flatten() for t in many]).unsqueeze(0) for many in zip(*held, strict=True))
    mask = selection.uniform(flat, where, sum(each * pos.shape[0] for _, pos in held))[0]
    parts = torch.split(mask, [pos.numel() for _, pos in held])
    return (part.view_as(pos) for part, (_, pos) in zip(parts, held, strict=True))


def prefix(layers: Scored, each: int, most: int) -> Iterator[Tensor]:
    """Every layer keeps what holds the same share of its scores (PrefixKV, arXiv 2412.03409), its heads equally."""
    held = list(layers)
    counts = selection.prefix(
        [_curve(score) for score, _ in held], each * len(held), max(map(_bound, (s for s, _ in held)))
    )
    return (selection.uniform(score, pos, count) for (score, pos), count in zip(held, counts, strict=True))


def _curve(score: Tensor) -> list[float]:
    """Share of a layer's scores that its heads' best 1, 2, .. slots hold; what stays anyhow holds nothing."""
    best = score.masked_fill(~score.isfinite(), 0.0).double()
    best = best.gather(1, score.argsort(dim=1, descending=True)).sum(0).cumsum(0)
    return (best / best[-1].clamp_min(1e-300)).tolist() if len(best) else []


def _bound(score: Tensor) -> int:
    """Slots that the head with most of them cannot let go."""
    return int((score == torch.inf).sum(1).max()) if score.numel() else 0
