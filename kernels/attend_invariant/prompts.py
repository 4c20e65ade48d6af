"""Attention of a prompt's rows by PyTorch's flash attention on a GPU (arXiv 2307.08691), where its rules allow it.

It knows no windows, bent scores, sinks and trees, and heads of one length alone. Stored slots and the rows themselves
are two calls, merged by their log-sum-exp. Such rows are not batch invariant; the order of sums depends on the chunk.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant.inputs import NewRows, StoredKV
from kvcli.kernels.merge_attention import PartialAttention


def serves(q: Tensor, run: StoredKV | None, own: NewRows, window: int | None, softcap: float) -> bool:
    """True if flash attention computes these rows q [H, N, D]."""
    if window is not None or softcap or own.tree_mask is not None or own.sink is not None:
        return False
    starts, lengths = ((), ()) if run is None else (run.starts, run.lengths)
    is_even = len({*lengths}) < 2 and len({b - a for a, b in pairwise(starts)}) < 2
    return is_even and own.k.shape[1] == q.shape[1] and own.v.shape[2] == q.shape[2]


def parts_of(q: Tensor, run: StoredKV | None, own: NewRows, scale: float) -> list[PartialAttention]:
    """Return attention of q [H, N, D] over stored slots, and over the rows up to each."""
    mine = _flash(q, own.k, own.v, scale, is_causal=True)
    if run is None or not run.lengths[0]:
        return [mine]
    return [_flash(q, _by_head(run.k, run), _by_head(run.v, run), scale, is_causal=False), mine]


def _by_head(slots: Tensor, run: StoredKV) -> Tensor:
    """Return slots [T, D] as a view [K, S, D]."""
    d, step = slots.shape[1], run.starts[1] - run.starts[0] if len(run.starts) > 1 else 0
    strides = step * slots.stride(0), *slots.stride()
    first = slots.storage_offset() + run.starts[0] * slots.stride(0)
    return slots.as_strided((len(run.starts), run.lengths[0], d), strides, first)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool) -> PartialAttention:
    """Compute attention of q [H, N, D] over k, v [K, S, D]; as many rows as slots if causal."""
    rows = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]  # [1, N, H, D]
    given = None, None, q.shape[1], k.shape[1], 0.0, is_causal, False
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*rows, *given, scale=scale)
    return PartialAttention(out[0].transpose(0, 1), lse[0])
