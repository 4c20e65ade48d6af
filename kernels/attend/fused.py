"""Attention of rows over stored slots in Triton: the kernel of attend_invariant without new KV."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.kernels.attend import reference
from kvcli.kernels.attend_invariant.fused import attend_invariant
from kvcli.kernels.attend_invariant.passes import MANY
from kvcli.kernels.attend_invariant.tables import Table, fits, uploaded


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float,
    mask: Tensor | None,
    length: int | Sequence[int],
    upto: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute as the reference, which serves masks and sizes that the kernel does not; `upto` [N] int32 on device."""
    if mask is not None or not fits(q.shape[2], v.shape[2]) or not k.shape[1]:
        return reference.attend(q, k, v, scale, softcap, mask, length, upto)
    kv, device = k.shape[0], q.device
    (flat_k, room), (flat_v, room_v) = _flat(k), _flat(v)
    if room != room_v:
        (flat_k, room), (flat_v, _) = _flat(k.contiguous()), _flat(v.contiguous())
    start = torch.arange(kv, dtype=torch.int32, device=device) * room
    if isinstance(length, int):
        lengths, capacity = torch.full((kv,), length, dtype=torch.int32, device=device), length
    else:
        lengths, capacity = uploaded([length], device)[0], max(length)
    out = q.new_empty(q.shape[1], q.shape[0], v.shape[2], dtype=torch.float32)
    table = Table(flat_k, flat_v, None, start, lengths)
    args = q, table, None, None, None, scale
    is_prompt = q.shape[1] > MANY
    out, lse = attend_invariant(*args, capacity=capacity, softcap=softcap, upto=upto, out=out, is_prompt=is_prompt)
    return out.transpose(0, 1), lse.T


def _flat(t: Tensor) -> tuple[Tensor, int]:
    """View [K, S, D] as [T, D], and return the slots from one head to the next; copies if rows are not contiguous."""
    kv, s, d = t.shape
    if t.stride(2) != 1 or t.stride(1) != d or t.stride(0) % d:
        t = t.contiguous()
    room = t.stride(0) // d
    return t.as_strided(((kv - 1) * room + s, d), (d, 1)), room
