"""What stores and passes hand over, as fused.py takes it: indices go to the device once a pass, not once a layer.

What was sent already is noted in the pass itself (`Own.sent`), under what it was made of; layers of one shape and
length share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcli.kernels.attend_rows import Own, Run
from kvcli.kernels.attend_rows.fused import attend_rows
from kvcli.kernels.attend_rows.tables import Table, Tree, uploaded
from kvcli.kernels.merge import Part
from kvcli.kernels.merge.fused import merge

MANY = 64  # rows of a prompt; beyond, there are programs enough without cutting the slots


def read(
    q: Tensor,
    run: Run | None,
    own: Own | None,
    pos: Sequence[int],
    scale: float,
    *,
    window: int | None,
    softcap: float,
    is_prompt: bool = False,
) -> Part:
    """As attend_rows.read; float32 for slots alone, to be merged."""
    sent, device, n = {} if own is None else own.sent, q.device, q.shape[1]

    def once(key: Any, make: Callable[[], Any]) -> Any:
        if key not in sent:
            sent[key] = make()
        return sent[key]

    if run is None:
        assert own is not None, "nothing to read"
        zeros = (0,) * own.k.shape[0]
        run = Run(own.k[0], own.v[0], torch.empty(0, dtype=torch.int32, device=device), zeros, zeros, zeros)
    heads = tuple(run.starts), tuple(run.lengths), tuple(run.pos_starts)
    start, length, pos_start = once(heads, lambda: uploaded(heads, device))
    table = Table(run.k, run.v, run.pos, start, length, pos_start)
    how: dict[str, Any] = {
        "capacity": max(heads[1]),
        "softcap": softcap,
        "window": window,
        "is_prompt": is_prompt and n > MANY,
    }
    if own is None:
        row_pos = None if window is None else uploaded([pos], device)[0]
        out = q.new_empty(n, q.shape[0], run.v.shape[1], dtype=torch.float32)
        out, lse = attend_rows(q, table, None, None, None, scale, row_pos=row_pos, out=out, **how)
        return Part(out.transpose(0, 1), lse.T)
    tree = once((n, len(own.pos)), lambda: _tree(own, device))
    sink = None if own.sink is None else own.sink.float()
    if not own.before:
        out, lse = attend_rows(q, table, own.k, own.v, tree, scale, sink=sink, **how)
        return Part(out.transpose(0, 1), lse.T)
    out = q.new_empty(n, q.shape[0], run.v.shape[1], dtype=torch.float32)
    out, lse = attend_rows(q, table, own.k, own.v, tree, scale, out=out, **how)
    parts = [*own.before, Part(out.transpose(0, 1), lse.T)]
    return Part(*merge([p.out for p in parts], [p.lse for p in parts], sink=sink, dtype=q.dtype))


def _tree(own: Own, device: torch.device) -> Tree:
    if own.line is None:
        return Tree.chain(own.pos, device)
    return Tree.of_seen([np.flatnonzero(row).tolist() for row in own.line.numpy()], own.pos, device)
