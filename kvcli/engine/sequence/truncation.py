"""Truncation: functions that drop unlikely (XTC: likely) tokens before sampling, by a score of -inf.

Those of log-probabilities take scores [N, C] that fall from left to right and are normalized.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

POINTS = 16  # numbers of tokens that are compared at once
NEWTON = 16  # steps: from above, towards the root of a convex function


def drop_below_sigma(logits: Tensor, n: float) -> Tensor:
    """Drop tokens more than n standard deviations of all logits [N, V] below the highest: top-n-sigma, arXiv
    2411.07641. Logits of -inf do not count."""
    counts = logits > -torch.inf
    wide = logits.double().where(counts, 0.0)
    size = counts.sum(-1, keepdim=True)
    apart = (wide - _sum(wide) / size).where(counts, 0.0)
    least = logits.amax(-1, keepdim=True) - n * (_sum(apart * apart) / size).sqrt()
    return logits.masked_fill(logits < least, -torch.inf)


def drop_tail(scores: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set with this total probability: nucleus sampling, arXiv 1904.09751."""
    probability = scores.exp()
    before = probability.cumsum(-1) - probability  # probability of the candidates before each
    return scores.masked_fill(before >= top_p, -torch.inf)


def drop_unlikely(scores: Tensor, min_p: float) -> Tensor:
    """Drop tokens less likely than this share of the most likely one: min-p, arXiv 2407.01082."""
    return scores.masked_fill(scores < scores[..., :1] + log(min_p), -torch.inf)


def drop_atypical(scores: Tensor, mass: float) -> Tensor:
    """Keep the tokens whose surprise is nearest to the entropy, up to this total probability: locally typical sampling,
    arXiv 2202.00666."""
    probability = scores.exp()
    entropy = -_sum((scores * probability).where(probability > 0, 0.0))
    distance, order = (-scores - entropy).abs().sort(stable=True)
    last = (probability.gather(-1, order).cumsum(-1) < mass).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    return scores.masked_fill((-scores - entropy).abs() > distance.gather(-1, last), -torch.inf)


def keep_sparse(scores: Tensor, cost: float, alpha: float) -> Tensor:
    """Keep the k likeliest tokens for which divergence(q, p) + cost * k is least, and return log q: Bregman top-k
    decoding, arXiv 2505.19371. The divergence has the generator x ** alpha / (alpha * (alpha - 1)), 1 < alpha <= 2."""
    # row by row, because a power may differ in its last bit among vectors of other lengths
    return torch.stack([_sparse(row.exp(), cost, alpha) for row in scores])


def _sparse(p: Tensor, cost: float, alpha: float) -> Tensor:
    head = p[: int(1 / ((alpha - 1) * cost)) + 1]  # more tokens than that always cost more than one
    slope, at = head ** (alpha - 1), torch.arange(len(head), device=p.device)
    tail = _sum(p**alpha) - (head**alpha).cumsum(-1)  # of the tokens behind each

    def nearest(last: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each `last` [K, 1] the q of the tokens up to it that is nearest to p, and its objective [K]."""
        # q = (slope + shift) ** (1 / (alpha - 1)) sums to 1; it is 0 where p is, as where a constraint forbids a token
        is_kept, shift = (at <= last) & (head > 0), (last + 1.0) ** (1 - alpha)
        for _ in range(NEWTON):
            root = ((slope + shift) ** (1 / (alpha - 1))).where(is_kept, 0.0)
            per_shift = _sum((root / (slope + shift)).where(is_kept, 0.0)) / (alpha - 1)
            shift = (shift - (_sum(root) - 1) / per_shift).clamp(min=0)  # p sums to at most 1
        q = ((slope + shift) ** (1 / (alpha - 1))).where(is_kept, 0.0)
        apart = (q**alpha - head**alpha) / alpha - slope * (q - head)
        return q, (_sum(apart.where(is_kept, 0.0)) / (alpha - 1) + tail[last] / alpha + cost * (last + 1)).squeeze(-1)

    low, step = at[:1], len(head)
    while step > 1:  # the objective is discretely convex in k: its minimum is beside the least of any points
        step = -(-2 * step // POINTS)
        points = (low + step * torch.arange(POINTS + 1, device=p.device)).clamp(max=len(head) - 1)
        best = points[nearest(points.unsqueeze(-1))[1].argmin(keepdim=True)]
        low = (best - step).clamp(min=0) if step > 1 else best
    return torch.nn.functional.pad(nearest(low.unsqueeze(-1))[0][0].log(), (0, len(p) - len(head)), value=-torch.inf)


def drop_top(scores: Tensor, threshold: float, is_due: Tensor) -> Tensor:
    """Drop all tokens from this probability on but the least likely of them, in rows where `is_due` [N]: XTC ("exclude
    top choices"), by p-e-w (text-generation-webui #6335)."""
    has_next = torch.nn.functional.pad(scores[..., 1:].exp() >= threshold, (0, 1))
    return scores.masked_fill(has_next & is_due.unsqueeze(-1), -torch.inf)


def _sum(x: Tensor) -> Tensor:
    # `sum` adds in another order for another number of rows
    return x.cumsum(-1)[..., -1:]
