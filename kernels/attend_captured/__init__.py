"""Rows over stored slots and each other, and slots made of rows, as a device does both without its host.

For passes that are recorded once (engine/cuda_graphs/captured_pass.py): nothing is asked of the host, shapes depend on
sizes of buffers alone, and where a head ends, or which rows are a row's ancestors, is read where it lies. What
kernels/attend_invariant and kernels/append_kv do on a GPU; elsewhere reference.py, for tests.
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

Storing = Callable[[Tensor, Tensor, Tensor], None]  # path [F], count [1], pos [N]: as kernels/append_kv says


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
    """q [H, N, D] over what is stored, then over their ancestors and themselves in k [K, N, D], v [K, N, E]
    -> [H, N, E] in q's type; of unused rows anything. No head holds more slots than `capacity`. `sink` [H]: logits that
    take mass and give nothing.
    """
    if triton_support.why_not(q.device, q.dtype):
        return reference.attend_captured(
            q, table, k, v, tree, scale, capacity=capacity, softcap=softcap, window=window, sink=sink
        )
    from kvcli.kernels.attend_invariant import fused  # Triton is imported where it serves

    sink = None if sink is None else sink.float()
    out, _ = fused.attend_invariant(
        q, table, k, v, tree, scale, capacity=capacity, softcap=softcap, window=window, sink=sink
    )
    return out.transpose(0, 1)


def storing(tables: Sequence[Table], fresh: Fresh) -> tuple[Storing, list[Tensor]]:
    """What has rows of these layers stored there, and what has to stay alive for it once it is recorded: `fresh`, too,
    of which a device knows addresses alone, or what is recorded later lies there."""
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
    """KV heads, and numbers of a key and of a value."""
    _, (k, v) = layer
    return k.shape[0], k.shape[2], v.shape[2]
