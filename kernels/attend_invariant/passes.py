"""Convert the arguments of KV caches and passes for fused.py. Indices are copied to the device once per pass.

The pass itself stores the copies (`NewRows.sent`), by the values they were made of; layers of one shape and length
share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import prompts
from kvcli.kernels.attend_invariant.fused import attend_invariant
from kvcli.kernels.attend_invariant.inputs import NewRows, StoredKV
from kvcli.kernels.attend_invariant.tables import Table, Tree, uploaded
from kvcli.kernels.merge_attention import PartialAttention
from kvcli.kernels.merge_attention.fused import merge_attention

# rows of a prefill pass; beyond, there are enough programs without spans, and partial results would be gigabytes
MANY = 64


def read(
    q: Tensor,
    run: StoredKV | None,
    own: NewRows | None,
    pos: Sequence[int],
    scale: float,
    *,
    window: int | None,
    softcap: float,
    is_prompt: bool = False,
) -> PartialAttention:
    """Compute attend_stored_and_new on a GPU; the result is float32 if it is a part of a merge."""
    sent, device, n = {} if own is None else own.sent, q.device, q.shape[1]
    is_prompt = n > MANY and (is_prompt or own is None)
    before = () if own is None else own.before
    if own is not None and is_prompt and prompts.serves(q, run, own, window, softcap):
        return _merged([*before, *prompts.parts_of(q, run, own, scale)], None, q.dtype)

    def once(key: Any, make: Callable[[], Any]) -> Any:
        if key not in sent:
            sent[key] = make()
        return sent[key]

    nothing = () if own is None else ((0,) * own.k.shape[0],) * 3
    heads: tuple[tuple[int, ...], ...] = (
        nothing if run is None else (tuple(run.starts), tuple(run.lengths), tuple(run.pos_starts))
    )
    start, length, pos_start = once(heads, lambda: uploaded(heads, device))
    if run is not None:
        table = Table(run.k, run.v, run.pos, start, length, pos_start)
    else:
        assert own is not None, "nothing to read"
        table = Table(own.k[0], own.v[0], start, start, length)  # a placeholder; nothing is read from it
    fresh: tuple[Tensor | None, Tensor | None, Tree | None] = None, None, None
    row_pos = None
    if own is not None:
        fresh = own.k, own.v, once((n, len(own.pos)), lambda: _tree(own, device))
    elif window is not None:
        (row_pos,) = uploaded([pos], device)
    sink = None if own is None or own.sink is None else own.sink.float()
    is_part = own is None or bool(before)
    out = q.new_empty(n, q.shape[0], table.v.shape[1], dtype=torch.float32 if is_part else q.dtype)
    out, lse = attend_invariant(
        *(q, table, *fresh, scale),
        capacity=max(heads[1]),
        softcap=softcap,
        window=window,
        sink=None if before else sink,
        row_pos=row_pos,
        out=out,
        is_prompt=is_prompt,
    )
    part = PartialAttention(out.transpose(0, 1), lse.T)
    return _merged([*before, part], sink, q.dtype)


def _merged(parts: Sequence[PartialAttention], sink: Tensor | None, dtype: torch.dtype) -> PartialAttention:
    if len(parts) == 1:
        return parts[0]
    return PartialAttention(*merge_attention([p.out for p in parts], [p.lse for p in parts], sink=sink, dtype=dtype))


def _tree(own: NewRows, device: torch.device) -> Tree:
    if own.tree_mask is None:
        return Tree.chain(own.pos, device)
    return Tree.of_seen([np.flatnonzero(row).tolist() for row in own.tree_mask.numpy()], own.pos, device)
