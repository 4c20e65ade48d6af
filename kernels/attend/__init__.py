"""Attention of rows over stored slots, with the log-sum-exp by which partial attention results merge.

Layouts: q [H, N, D], k [K, S, D], v [K, S, E], where E may be D; query head h reads KV head h // (H // K). K/V are not
copied per query head. `mask` allows: [N, S] for all heads or [K, N, S]; None = every row sees every slot. None is the
usual case, because stored slots are older than every row. Masked slots must still be finite numbers. Results: out
[H, N, E] and lse [H, N]; a row that sees no slot has lse = -inf and out = 0. Strides of k and v are free, but D and E
are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcli.kernels import dispatch
from kvcli.kernels.merge_attention import PartialAttention


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    softcap: float = 0.0,
    mask: Tensor | None = None,
    length: int | Sequence[int] | None = None,
    upto: Tensor | None = None,
) -> PartialAttention:
    """Compute the partial attention of rows over slots. `softcap` > 0 caps scores as in Gemma 2; S may be 0.

    `length`: only the first so many slots are read, in all KV heads or in each. The rest is spare capacity, which must
    hold finite numbers. Passing a whole buffer this way saves a copy for kernels that need contiguous input, and a mask
    if heads differ. `upto` [N] int32, beside q: a row sees only slots before this index. Both are invalid with a mask.
    """
    assert mask is None or (length is None and upto is None), "a mask says itself which slots count"
    if length is None:
        length = k.shape[1]
    elif not isinstance(length, int) and len(set(length)) == 1:
        length = length[0]
    found = dispatch.choose("attend", q.device.type, q.dtype, softcap > 0 or upto is not None)
    return PartialAttention(*found(q, k, v, scale, softcap, mask, length, *(() if upto is None else (upto,))))
