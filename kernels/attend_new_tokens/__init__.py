"""Attention of a pass's rows over each other: causal in a prefill chunk, by ancestors in a draft tree.

q [H, n, D], k [K, N, D], v [K, N, E], the n rows being the last of the N. `sees` [n, N] bool allows (row i sees row j);
None = causal, n = N and row i sees rows 0..i. Every row sees itself, so no row is empty. Returns partial attention, as
`attend` does.
"""

from __future__ import annotations

from torch import Tensor

from kvcli.kernels import dispatch
from kvcli.kernels.merge_attention import PartialAttention


def attend_new_tokens(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sees: Tensor | None = None, *, softcap: float = 0.0
) -> PartialAttention:
    """Compute the partial attention of rows over rows."""
    return PartialAttention(
        *dispatch.choose("attend_new_tokens", q.device.type, q.dtype, softcap > 0)(q, k, v, scale, sees, softcap)
    )
