"""Attention of rows over quantized slots, with the log-sum-exp by which partial attention results merge.

q [H, N, D]; one `PackedHead` per KV head, each of its own length, with values of size E; query head h reads head h //
(H // K). `masks` allow, one per head: [N, S] or [1, S] bool, None = every row sees every slot. `dtype` is the dtype of
the KV cache's computation. float32 and float64 run in full precision (dequantized keys and values, products and sums in
that dtype). For 16-bit dtypes the softmax and the sums are float32, and probabilities are rounded to 16 bits for the
product with the values, as in `attend`. Results: out [H, N, E] and lse [H, N]; a row that sees no slot has lse = -inf
and out = 0.
`attend_table` computes the same in one launch, batch invariant, for heads that are unchanged from pass to pass: on GPUs
that kernels/triton_support.py supports, for heads that `table.why_not` accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels import dispatch, triton_support
from kvcli.kernels.attend_quantized import reference
from kvcli.kernels.attend_quantized.table import PackedHead, PackedTable, table_of, why_not
from kvcli.kernels.merge_attention import PartialAttention


def attend_quantized(
    q: Tensor,
    heads: Sequence[PackedHead],
    scale: float,
    dtype: torch.dtype,
    *,
    softcap: float = 0.0,
    masks: Sequence[Tensor | None] | None = None,
) -> PartialAttention:
    """Compute partial attention over quantized slots. `softcap` > 0 caps scores as in Gemma 2; heads may be empty."""
    masks = masks or [None] * len(heads)
    return PartialAttention(*_chosen(q, heads, dtype, masks)(q, heads, scale, dtype, softcap, masks))


def attend_table(
    q: Tensor,
    table: PackedTable,
    scale: float,
    pos: Sequence[int] | Tensor,
    *,
    softcap: float = 0.0,
    window: int | None = None,
) -> PartialAttention:
    """Compute attention of q [H, N, D] of any float dtype, at positions pos [N], over a layer's heads except holes.
    With `pos` int32 on the device, it can be captured."""
    from kvcli.kernels.attend_invariant.tables import uploaded
    from kvcli.kernels.attend_quantized import fused  # imports Triton, which is not installed everywhere

    at = pos if isinstance(pos, Tensor) else uploaded([pos], q.device)[0] if window is not None else None
    return PartialAttention(*fused.attend(q, table, scale, softcap, at, window or 0))


def _chosen(
    q: Tensor, heads: Sequence[PackedHead], dtype: torch.dtype, masks: Sequence[Tensor | None]
) -> Callable[..., Any]:
    if any(head.keys.fine is not None for head in heads):  # split codes, which only the reference supports
        return reference.attend_quantized
    if not triton_support.why_not(q.device, dtype) and why_not(heads, masks):
        return reference.attend_quantized
    return dispatch.choose("attend_quantized", q.device.type, dtype)


__all__ = ["PackedHead", "PackedTable", "attend_quantized", "attend_table", "table_of", "why_not"]
