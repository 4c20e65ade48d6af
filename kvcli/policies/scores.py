"""What a slot is worth, by method: pure functions from slots and queries to scores [K, S], higher = keep.

Scores of empty slots (pos = -1) mean nothing. Attention masses are computed again for the few queries at hand
(kernels/column_mass), so no attention map is ever stored. Query heads that share a KV head are averaged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from kvcli.kernels.column_mass import Over, column_mass
from kvcli.policies.units import Pooling, by_position, pooled

if TYPE_CHECKING:
    from kvcli.kv.slots import Slots
    from kvcli.policies.base import Moment


def mass(s: Slots, at: Moment, first: int = 0, over: Over = "mean") -> Tensor:
    """Attention of the heard queries from row `first` on -> [K, S]."""
    q, q_pos = at.q[:, first:], at.q_pos[first:]
    return column_mass(q, q_pos, s.k, s.pos, at.scale, softcap=at.softcap, window=at.window, over=over)


def snap(s: Slots, at: Moment, queries: int, pool: int, kind: Pooling) -> Tensor:
    """SnapKV (arXiv 2404.14469): mean attention of the newest `queries`, smoothed over `pool` positions."""
    return pooled(mass(s, at, max(0, at.q.shape[1] - queries)), s.pos, pool, kind)


def tova(s: Slots, at: Moment) -> Tensor:
    """TOVA (arXiv 2401.06104): attention of the newest query, averaged over the heads of the layer."""
    one = mass(s, at, max(0, at.q.shape[1] - 1))
    held = by_position((s.pos >= 0).to(one.dtype), s.pos, 0.0).sum(0)
    mean = by_position(one, s.pos, 0.0).sum(0) / held.clamp_min(1)
    return mean.gather(0, s.pos.clamp(min=0).long().flatten()).view_as(one) if mean.numel() else one


def knorm(s: Slots) -> Tensor:
    """L2 norm (arXiv 2406.11430): short keys tend to be looked at."""
    return -_norm(s.k.to(_wide(s.k)))


def keydiff(s: Slots) -> Tensor:
    """KeyDiff (arXiv 2504.15364): keys unlike the others, by cosine with the mean direction of all."""
    way = functional.normalize(s.k.to(_wide(s.k)), dim=2)
    anchor = way.masked_fill((s.pos < 0).unsqueeze(-1), 0.0).sum(1, keepdim=True)  # its length cancels
    return -functional.cosine_similarity(way, anchor, dim=2)


def lag(s: Slots, sinks: int, size: int, across: bool) -> Tensor:
    """LagKV (arXiv 2504.04704): how far keys and values spread in the range of the `size` tokens behind theirs.

    Behind `sinks` tokens the text is cut in parts of `size`. A part is measured by the next one, and its tokens are
    ranked; `across` leaves out the ranks, so that parts compete. Sinks, and what no whole part follows, score highest.
    """
    order = s.pos.where(s.pos >= 0, torch.iinfo(s.pos.dtype).max).argsort(dim=1, stable=True)  # empty ones last
    count = (s.pos >= 0).sum(1, keepdim=True) - sinks  # [K, 1] tokens cut into parts
    parts = (s.n_slots - sinks) // size
    out = s.k.new_ones(s.pos.shape, dtype=_wide(s.k))
    if parts < 2:
        return out
    body = order[:, sinks : sinks + parts * size]
    spread = (_spread(s.k, body, size) + _spread(s.v, body, size)) / 2  # [K, parts - 1, size]
    if not across:
        spread = spread.argsort(dim=2, stable=True).argsort(dim=2).to(spread.dtype) / size
    whole = (torch.arange(2, parts + 1, device=s.pos.device) * size <= count).unsqueeze(-1)  # the part behind it too
    spread = spread.where(whole, 1.0)
    return out.scatter_(1, body[:, : (parts - 1) * size], spread.flatten(1))


def _spread(x: Tensor, body: Tensor, size: int) -> Tensor:
    """[K, parts - 1, size]: share of a token's spread over channels in its part."""
    cut = x.to(_wide(x)).gather(1, body.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    cut = cut.view(x.shape[0], -1, size, x.shape[2])  # [K, parts, size, D]
    low, high = cut[:, 1:].amin(2, keepdim=True), cut[:, 1:].amax(2, keepdim=True)
    room = (high - low).clamp_min(torch.finfo(cut.dtype).tiny)  # a channel that never moves
    spread: Tensor = ((cut[:, :-1] - low) / room).std(dim=3).softmax(dim=2)
    return spread


def expected(s: Slots, mean: Tensor, cov: Tensor | None, scale: float, softcap: float, epsilon: float) -> Tensor:
    """Expected Attention (arXiv 2510.00636): attention of queries drawn from a normal distribution, times value norm.

    mean [H, D], cov [H, D, D] of the queries to come, as they will stand to the stored keys; None = the mean alone.
    E exp(q·k) = exp(mean·k + k·cov·k / 2), normalised over the slots; a softcap bends the exponent.
    """
    kv, _, d = s.k.shape
    k = s.k.to(mean.dtype)
    mean = mean.view(kv, -1, d)
    z = mean @ k.transpose(1, 2) * scale  # [K, G, S]
    if cov is not None:
        for g in range(mean.shape[1]):  # one query head of each group at a time: [K, S, D] is all that is made
            z[:, g] += ((k @ cov.view(kv, -1, d, d)[:, g]) * k).sum(2) * (scale * scale / 2)
    if softcap > 0:
        z = softcap * torch.tanh(z / softcap)
    share = z.masked_fill((s.pos < 0).unsqueeze(1), -torch.inf).softmax(dim=2).mean(1)
    share = share.nan_to_num(0.0)  # a head without slots
    return (share + epsilon) * _norm(s.v.to(mean.dtype))


def _norm(x: Tensor) -> Tensor:
    """[K, S, D] -> [K, S]."""
    return (x * x).sum(2).sqrt()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
