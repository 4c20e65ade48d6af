"""Attention of rows over quantized slots in plain PyTorch: dequantize, then attend, one KV head at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.kernels.attend.reference import attend
from kvcli.kernels.attend_quantized.table import PackedHead
from kvcli.kernels.quantize_kv import unpack_keys, unpack_values


def attend_quantized(
    q: Tensor,
    heads: Sequence[PackedHead],
    scale: float,
    dtype: torch.dtype,
    softcap: float,
    masks: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(q.dtype, torch.promote_types(dtype, torch.float32))
    rows = q.unflatten(0, (len(heads), -1)).to(exact)  # [K, G, N, D]
    found = [_head(*each, scale, softcap) for each in zip(rows, heads, masks, strict=True)]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def _head(q: Tensor, head: PackedHead, mask: Tensor | None, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Compute q [G, N, D] -> out [G, N, E], lse [G, N]."""
    k = torch.cat([unpack_keys(head.keys, q), head.rest.to(q.dtype)]).unsqueeze(0)
    v = unpack_values(head.values, q, head.length).unsqueeze(0)
    if mask is not None:
        mask = mask.expand(q.shape[1], -1)
    return attend(q, k, v, scale, softcap, mask, head.length)
