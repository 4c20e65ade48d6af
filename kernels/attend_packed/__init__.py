"""Attention of rows over slots that are stored in few bits, with the log-sum-exp that lets parts merge.

q [H, N, D]; one `PackedHead` for each KV head, of its own length; query head h reads head h // (H // K). `masks` allow,
one per head: [N, S] or [1, S] bool, None = every row sees every slot. `dtype` is what the store computes in: float32
and float64 are held to in full (keys and values as their codes say, products and sums in that type); for 16-bit types
the softmax and the sums are float32, and probabilities are rounded to 16 bits for the product with the values, as
`attend` does. Results: out [H, N, D] and lse [H, N]; a row that sees nothing has lse = -inf and out = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels import dispatch
from kvcli.kernels.attend_packed import reference
from kvcli.kernels.merge import Part
from kvcli.kernels.pack import Rounded


@dataclass(frozen=True, slots=True)
class PackedHead:
    """The slots of one KV head."""

    keys: Rounded  # of the first slots
    rest: Tensor  # [r, D] keys of the last slots, in full
    values: Rounded  # of all slots, and more where the layout has spare room
    length: int  # slots


def attend_packed(
    q: Tensor,
    heads: Sequence[PackedHead],
    scale: float,
    dtype: torch.dtype,
    *,
    softcap: float = 0.0,
    masks: Sequence[Tensor | None] | None = None,
) -> Part:
    """Rows over packed slots -> one part. `softcap` > 0 bends scores as Gemma 2 does; heads may be empty."""
    has_halves = any(head.keys.fine is not None for head in heads)  # which the plain one alone reads
    run = reference.attend_packed if has_halves else dispatch.choose("attend_packed", q.device.type, dtype)
    return Part(*run(q, heads, scale, dtype, softcap, masks or [None] * len(heads)))
