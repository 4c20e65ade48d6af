"""Attention of rows over heads that lie end to end, each with slots of its own, with the log-sum-exp of its scores.

q [H, N, D]; k, v [T, D] hold KV head j in the slots `spans[j]` = (first, how many); query head h reads KV head
h // (H // K). Every row sees every slot of its head. Results as those of `attend`: out [H, N, D] and lse [H, N]; rows
over a head without slots have lse = -inf and out = 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcli.kernels import dispatch
from kvcli.kernels.merge import Part

Spans = Sequence[tuple[int, int]]


def attend_apart(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, *, softcap: float = 0.0) -> Part:
    """Rows over all heads -> one part. `softcap` > 0 bends scores as Gemma 2 does."""
    return Part(*dispatch.choose("attend_apart", q.device.type, q.dtype, softcap > 0)(q, k, v, spans, scale, softcap))
