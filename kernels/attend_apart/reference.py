"""Rows over heads that lie end to end, in plain PyTorch: head by head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kernels.attend.reference import attend

if TYPE_CHECKING:
    from kvcli.kernels.attend_apart import Spans


def attend_apart(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    return head_by_head(attend, q, k, v, spans, scale, softcap)


def head_by_head(
    run: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """`run`, an implementation of `attend`, over each head in turn."""
    found = []
    for rows, (first, n) in zip(q.unflatten(0, (len(spans), -1)), spans, strict=True):
        one, other = (t[first : first + n].unsqueeze(0) for t in (k, v))
        found.append(run(rows, one, other, scale, softcap, None, n))
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])
