"""Attention of rows over slots that are stored in few bits, with the log-sum-exp that lets parts merge.

q [H, N, D]; one `PackedHead` for each KV head, of its own length, with values of E numbers; query head h reads head
h // (H // K). `masks` allow, one per head: [N, S] or [1, S] bool, None = every row sees every slot. `dtype` is what the
store computes in: float32 and float64 are held to in full (keys and values as their codes say, products and sums in
that type); for 16-bit types the softmax and the sums are float32, and probabilities are rounded to 16 bits for the
product with the values, as `attend` does. Results: out [H, N, E] and lse [H, N]; a row that sees nothing has lse = -inf
and out = 0.
`attend_table` is the same for heads that do not change from pass to pass, in one launch and the same bits for a row
whoever comes along: on GPUs that kernels/triton_support.py names, of heads that `table.why_not` does not refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels import dispatch, triton_support
from kvcli.kernels.attend_quantized import reference
from kvcli.kernels.attend_quantized.table import Table, table_of, why_not
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kernels.quantize_kv import Rounded


@dataclass(frozen=True, slots=True)
class PackedHead:
    """The slots of one KV head."""

    keys: Rounded  # of the first slots
    rest: Tensor  # [r, D] keys of the last slots, in full
    values: Rounded  # of all slots, and more where the layout has spare room
    length: int  # slots

    @property
    def v_dim(self) -> int:
        """Numbers of a value."""
        codes, bits = self.values.codes, self.values.bits
        return codes.shape[0] if bits == 8 else codes.shape[1] if bits == 16 else codes.shape[1] * 8 // bits


def attend_quantized(
    q: Tensor,
    heads: Sequence[PackedHead],
    scale: float,
    dtype: torch.dtype,
    *,
    softcap: float = 0.0,
    masks: Sequence[Tensor | None] | None = None,
) -> PartialAttention:
    """Rows over packed slots -> one part. `softcap` > 0 bends scores as Gemma 2 does; heads may be empty."""
    masks = masks or [None] * len(heads)
    return PartialAttention(*_chosen(q, heads, dtype, masks)(q, heads, scale, dtype, softcap, masks))


def attend_table(
    q: Tensor, table: Table, scale: float, pos: Sequence[int], *, softcap: float = 0.0, window: int | None = None
) -> PartialAttention:
    """Rows q [H, N, D] of any float type, at positions pos [N], over a layer's heads; holes are not seen."""
    from kvcli.kernels.attend_quantized import fused  # brings Triton, which is not everywhere

    at = None
    if window is not None:
        at = torch.tensor(pos, dtype=torch.int32)
        at = at.pin_memory().to(q.device, non_blocking=True) if q.is_cuda else at
    return PartialAttention(*fused.attend(q, table, scale, softcap, at, window or 0))


def _chosen(
    q: Tensor, heads: Sequence[PackedHead], dtype: torch.dtype, masks: Sequence[Tensor | None]
) -> Callable[..., Any]:
    if any(head.keys.fine is not None for head in heads):  # halves, which the plain one alone reads
        return reference.attend_quantized
    if not triton_support.why_not(q.device, dtype) and why_not(heads, masks):
        return reference.attend_quantized
    return dispatch.choose("attend_quantized", q.device.type, dtype)


__all__ = ["PackedHead", "Table", "attend_quantized", "attend_table", "table_of", "why_not"]
