"""Attention of a few rows over all slots, computed in pieces of bounded size, and statistics of it.

Memory is bounded at any context length: MOST_BYTES sets the rows per piece, and one row of n weights is the minimum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcli.engine.policy.policy import LayerContext
from kvcli.engine.sequence.state import END, NEWLINE, PUNCT, SPECIAL
from kvcli.kv.slots import AttentionParams, Slots
from kvcli.kv.sparse.index import scale_and_softcap

MOST_BYTES = 64 << 20  # memory per piece
COPIES = 8  # tensors of a piece's size in memory at once: scores, weights, sorted weights, distances, bins
SHARES = (0.5, 0.9, 0.95, 0.99)  # shares of the attention mass for which tokens are counted
FAR = 24  # bins of the distance histogram: 0, 1, 2-3, 4-7, ... tokens
TOP = 12  # tokens listed per head


@dataclass(slots=True)
class HeadRows:
    """Attention of some rows for one KV head."""

    rows: slice  # of the recorded queries
    q_pos: Tensor  # [R]
    pos: Tensor  # [S] positions of the slots; -1 = empty
    p: Tensor  # [G, R, S] float32, rows sum to 1


def pieces(s: Slots, at: LayerContext, head: int, most: int = MOST_BYTES) -> Iterator[HeadRows]:
    """Yield the attention of the recorded queries, for the query heads of one KV head."""
    pos = s.pos[head].long()
    for rows, score in _scores(s, at, head, at.window, most):
        yield HeadRows(rows, at.q_pos[rows].to(pos.device), pos, score.softmax(-1))


def _scores(s: Slots, at: LayerContext, head: int, window: int | None, most: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows and their scores [G, R, S]; -inf for slots that a row cannot attend to."""
    group = at.q.shape[0] // s.k.shape[0]
    q = at.q[head * group : (head + 1) * group].float()  # [G, w, D]
    k, pos = s.k[head].float(), s.pos[head].long()
    params = AttentionParams(at.scale, at.softcap)
    step = max(1, most // max(1, COPIES * 4 * group * pos.shape[0]))
    for a in range(0, q.shape[1], step):
        rows = slice(a, min(a + step, q.shape[1]))
        q_pos = at.q_pos[rows].to(pos.device)
        score = scale_and_softcap(torch.matmul(q[:, rows], k.T), params)
        shown = (pos >= 0) & (pos <= q_pos.unsqueeze(1))  # [R, S]
        if window is not None:
            shown &= pos > q_pos.unsqueeze(1) - window
        yield rows, score.masked_fill_(~shown, -torch.inf)


@dataclass(slots=True)
class AttentionSummary:
    """Attention statistics of one KV head: means over its query heads and rows."""

    entropy: float = 0.0  # nats
    needed: list[float] = field(default_factory=lambda: [0.0] * len(SHARES))  # tokens with each share of SHARES
    sink: float = 0.0  # mass on the first tokens
    local: float = 0.0  # mass on the newest tokens up to and including the row
    far: float = 0.0  # mass on all other tokens
    worst: float = 0.0  # `far` over the tenth of rows where it is largest
    kinds: dict[str, float] = field(default_factory=dict)  # mass by kind of token
    distances: list[float] = field(default_factory=list)  # mass by log2 of the distance
    top: list[tuple[int, float]] = field(default_factory=list)  # (position, mass) of the tokens with most attention


NAMES = {"special": (SPECIAL,), "punct": (PUNCT, END), "newline": (NEWLINE,)}


def gaze(s: Slots, at: LayerContext, head: int, sinks: int, recent: int, most: int = MOST_BYTES) -> AttentionSummary:
    """Compute the statistics of one head. The `sinks` first and `recent` newest tokens are counted separately."""
    found, far = AttentionSummary(distances=[0.0] * FAR), list[Tensor]()
    kinds = at.kinds.to(s.pos.device)[s.pos[head].clamp(min=0).long()]  # [S]
    column = torch.zeros(s.pos.shape[1], device=s.pos.device)
    n = 0
    for piece in pieces(s, at, head, most):
        p = piece.p
        rows = p.shape[0] * p.shape[1]
        n += rows
        found.entropy += float(-torch.special.xlogy(p, p).sum())
        running = p.sort(-1, descending=True).values.cumsum_(-1)
        for i, share in enumerate(SHARES):
            found.needed[i] += float((running < share).sum()) + rows
        beyond = piece.q_pos.unsqueeze(1) - piece.pos  # [R, S] distance, negative for slots after the row
        first = piece.pos < sinks
        near = (beyond < recent) & ~first
        found.sink += float(p[..., first].sum())
        found.local += float((p * near).sum())
        far.append((p * ~(near | first)).sum(-1))  # [G, R]
        for name, these in NAMES.items():
            of_kind = sum(kinds == kind for kind in these) > 0
            found.kinds[name] = found.kinds.get(name, 0.0) + float(p[..., of_kind & ~first].sum())
        by_slot = p.sum(0)  # [R, S]
        column += by_slot.sum(0)
        bins = torch.log2(beyond.clamp(min=0).float() + 0.5).floor_().add_(1).clamp_(0, FAR - 1).long()
        hist = torch.zeros(FAR, device=p.device).index_add_(0, bins.flatten(), by_slot.flatten())
        found.distances = [a + b for a, b in zip(found.distances, hist.tolist(), strict=True)]
    _divide(found, n)
    mass = torch.cat(far, 1)  # [G, w]
    found.far = float(mass.mean())
    tenth = max(1, round(mass.shape[1] / 10))
    found.worst = float(mass.mean(0).topk(tenth).values.mean())
    best = (column / n).topk(min(TOP, column.shape[0]))
    found.top = list(zip(s.pos[head][best.indices].tolist(), best.values.tolist(), strict=True))
    return found


def _divide(found: AttentionSummary, n: int) -> None:
    found.entropy /= n
    found.sink /= n
    found.local /= n
    found.needed = [value / n for value in found.needed]
    found.kinds = {name: value / n for name, value in found.kinds.items()}
    found.distances = [value / n for value in found.distances]
    while len(found.distances) > 1 and not found.distances[-1]:
        found.distances.pop()


def normaliser(s: Slots, at: LayerContext, head: int, most: int = MOST_BYTES) -> Tensor:
    """Return the log-sum-exp [G, w] of each row's scores over all slots up to the row."""
    return torch.cat([score.logsumexp(-1) for _, score in _scores(s, at, head, None, most)], 1)
