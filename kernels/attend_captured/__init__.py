"""Attention over stored slots and new rows, and their commit, for captured passes.

Captured passes (engine/cuda_graphs/captured_passes.py) run without the host. Shapes depend on buffer sizes alone, and
the length of a head and the ancestors of a row are read from device tables. On a GPU kernels/attend_invariant and
kernels/append_kv do the work; elsewhere reference.py, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from kvcli.kernels import triton_support
from kvcli.kernels.append_kv import Fresh, addresses
from kvcli.kernels.attend_captured import reference
from kvcli.kernels.attend_invariant.tables import Table, Tree
from kvcli.kernels.merge_attention import PartialAttention

Storing = Callable[[Tensor, Tensor, Tensor], None]  # path [F], count [1], pos [N]: as in kernels/append_kv


def attend_captured(
    q: Tensor,
    table: Table,
    k: Tensor,
    v: Tensor,
    tree: Tree,
    scale: float,
    capacity: int,
    *,
    softcap: float = 0.0,
    window: int | None = None,
    sink: Tensor | None = None,
    before: Sequence[PartialAttention] = (),
    out: Tensor | None = None,
) -> Tensor:
    """Compute attention of q [H, N, D] over stored slots, then over the rows on its path in k [K, M, D], v [K, M, E] ->
    [H, N, E] in q's dtype; the result of unused rows is undefined. No head has more slots than `capacity`. `sink` [H]:
    attention sink logits, which add mass and no value. `before`: partial attention to older slots, merged with this.
    `out`: a result in which the rows in use are replaced."""
    if triton_support.why_not(q.device, q.dtype):
        given = q, table, k, v, tree, scale, capacity
        return reference.attend_captured(*given, softcap=softcap, window=window, sink=sink, before=before, out=out)
    from kvcli.kernels.attend_invariant import fused  # imports Triton, so only where it is supported
    from kvcli.kernels.merge_attention.fused import merge_attention

    sink, of = None if sink is None else sink.float(), (q, table, k, v, tree, scale)
    attend = partial(fused.attend_invariant, *of, capacity=capacity, softcap=softcap, window=window)
    if not before:
        return attend(sink=sink, out=None if out is None else out.transpose(0, 1))[0].transpose(0, 1)
    top, lse = attend(out=q.new_empty(q.shape[1], q.shape[0], table.v.shape[1], dtype=torch.float32))
    outs, lses = [*(part.out for part in before), top.transpose(0, 1)], [*(part.lse for part in before), lse.T]
    made, _ = merge_attention(outs, lses, sink=sink, dtype=q.dtype)
    return made if out is None else torch.where((tree.path_of >= 0).view(1, -1, 1), made, out)


def storing(tables: Sequence[Table], fresh: Fresh) -> tuple[Storing, list[Tensor]]:
    """Return a function that commits rows of these layers, and the tensors that must stay alive once it is captured.
    The new KV is among them, because the device knows only addresses, and later captures would reuse its memory."""
    k, alive = fresh[0][0], [t for pair in fresh for t in pair]
    if triton_support.why_not(k.device, k.dtype):
        return partial(reference.store, tables, fresh), alive
    from kvcli.kernels.append_kv import fused

    alike = groupby(sorted(zip(tables, fresh, strict=True), key=_sizes), key=_sizes)
    groups = [
        (sizes, addresses([t for t, _ in some], [f for _, f in some], k.device))
        for sizes, each in alike
        if (some := [*each])
    ]
    like = torch.empty(0, dtype=k.dtype, device=k.device)

    def store(path: Tensor, count: Tensor, pos: Tensor) -> None:
        for (heads, d, e), layers in groups:
            fused.append_kv(layers, path, count, pos, heads=heads, d=d, e=e, like=like)

    return store, [*alive, *(layers for _, layers in groups)]


def _sizes(layer: tuple[Table, tuple[Tensor, Tensor]]) -> tuple[int, int, int]:
    """Return the number of KV heads, key size and value size."""
    _, (k, v) = layer
    return k.shape[0], k.shape[2], v.shape[2]
