"""Attention mass per slot for a few queries: scores for eviction policies, without an attention map.

Layouts: q [H, w, D] at positions q_pos [w], k [K, S, D] at positions pos [K, S] (-1 = empty), both after rotary
embedding; query head h reads KV head h // (H // K). A row sees the slots at its own position and before it, in a
sliding layer the newest `window` of them. A row's masses over the slots that it sees sum to one; a row that sees no
slot has none, and a model's learned attention sinks are left out. No tensor of rows x slots x heads is created unless
requested. Computed in float32, in float64 if queries or keys are. Strides of k are free.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvcli.kernels import triton_support
from kvcli.kernels.attention_mass.reference import attention_mass as _reference

# over rows and the query heads of a KV head: their mean, the mean over the heads of the sum over rows, their maximum;
# or no reduction
SIZES = (64, 128, 256)  # head sizes of the GPU kernel

Over = Literal["mean", "sum", "max", "none"]


def attention_mass(
    q: Tensor,
    q_pos: Tensor,
    k: Tensor,
    pos: Tensor,
    scale: float,
    *,
    softcap: float = 0.0,
    window: int | None = None,
    over: Over = "mean",
) -> Tensor:
    """Return the masses [K, S], or [K, G, w, S] with over = "none". No rows give zeros."""
    assert q.shape[0] % k.shape[0] == 0, "each KV head serves as many query heads"
    assert q.shape[1] == q_pos.shape[0], "each query has a position"
    given = q, q_pos, k, pos, scale, softcap, window, over
    if q.dtype == k.dtype and q.shape[2] in SIZES and not triton_support.why_not(k.device, k.dtype):
        from kvcli.kernels.attention_mass import fused  # imports Triton, which is not installed everywhere

        return fused.attention_mass(*given)
    return _reference(*given)
