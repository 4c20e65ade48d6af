"""Attention of rows over stored slots, with the log-sum-exp that lets parts merge.

Layouts: q [H, N, D], k [K, S, D], v [K, S, E], where E may be D; query head h reads KV head h // (H // K). No copy of
K/V per query head is made. `mask` allows: [N, S] for all heads or [K, N, S]; None = every row sees every slot, which is
the usual case, as stored slots are older than every row. What a mask hides must still be finite numbers. Results: out
[H, N, E] and lse [H, N]; a row that sees nothing has lse = -inf and out = 0. Strides of k and v are free, but D and E
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
    """Rows over slots -> one part. `softcap` > 0 bends scores as Gemma 2 does; S may be 0.

    `length` says that only the first so many slots count, in all KV heads or in each: the rest is spare room, which
    must hold finite numbers. Handing over a whole slab this way spares kernels that want their input in one piece a
    copy, and a mask where heads differ. `upto` [N] int32, beside q: a row sees slots before that one only. Neither goes
    with a mask.
    """
    assert mask is None or (length is None and upto is None), "a mask says itself which slots count"
    if length is None:
        length = k.shape[1]
    elif not isinstance(length, int) and len(set(length)) == 1:
        length = length[0]
    found = dispatch.choose("attend", q.device.type, q.dtype, softcap > 0 or upto is not None)
    return PartialAttention(*found(q, k, v, scale, softcap, mask, length, *(() if upto is None else (upto,))))
