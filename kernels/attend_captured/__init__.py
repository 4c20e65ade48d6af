"""Attention over stored slots and new rows, and their commit, for captured passes.

Captured passes (engine/cuda_graphs/captured_pass.py) run without the host. Shapes depend on buffer sizes alone, and the
length of a head and the ancestors of a row are read from device tables. On a GPU kernels/attend_invariant and
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

Storing = Callable[[Tensor, Tensor, Tensor], None]  # path [F], count [1], pos [N]: as in kernels/append_kv


def attend_captured(
    q: Tensor,
    table: Table,
    k: Tensor,
    v: Tensor,
    tree: Tree,
    scale: float,
    *,
    capacity: int,
    softcap: float = 0.0,
    window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Compute attention of q [H, N, D] over stored slots, then over ancestors and itself in k [K, N, D], v [K, N, E] ->
    [H, N, E] in q's dtype; the result of unused rows is undefined. No head has more slots than `capacity`. `sink` [H]:
    attention sink logits, which add mass and no value."""
    if triton_support.why_not(q.device, q.dtype):
        return reference.attend_captured(
            q, table, k, v, tree, scale, capacity=capacity, softcap=softcap, window=window, sink=sink
        )
    from kvcli.kernels.attend_invariant import fused  # imports Triton, so only where it is supported

    sink = None if sink is None else sink.float()
    out, _ = fused.attend_invariant(
        q, table, k, v, tree, scale, capacity=capacity, softcap=softcap, window=window, sink=sink
    )
    return out.transpose(0, 1)


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
