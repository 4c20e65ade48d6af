"""Commit: move the KV of accepted rows from a forward pass into the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kv.slots import Slots

if TYPE_CHECKING:
    from kvcli.engine.forward_request import ForwardResult
    from kvcli.engine.rows import Rows
    from kvcli.kv.slots import KVCache


def commit(kv: KVCache, rows: Rows, made: ForwardResult, path: Sequence[int]) -> None:
    """Store the keys and values of these rows in each layer that they ran through."""
    if not path:
        return
    if made.keep is not None:
        made.keep(path)
        return
    devices = {fresh.k.device for fresh in made.fresh.values()}
    is_run = path[-1] - path[0] == len(path) - 1
    is_all = is_run and len(path) == rows.n_rows
    taken = slice(path[0], path[-1] + 1) if is_run else {d: torch.tensor(path, device=d) for d in devices}
    pos = rows.pos if is_all else [rows.pos[row] for row in path]
    # prompt pruning leaves hundreds of gaps
    has_gaps = pos[-1] - pos[0] != len(pos) - 1
    at = {d: torch.tensor(pos, dtype=torch.int32, device=d) for d in devices} if has_gaps else None
    for layer, fresh in made.fresh.items():
        k = fresh.k if is_all else _picked(fresh.k, taken)
        v = k if fresh.v is fresh.k else fresh.v if is_all else _picked(fresh.v, taken)
        if at is None:
            kv.append(layer, k, v, pos[0])
        else:
            kv.take(layer, Slots(k, v, at[k.device].expand(k.shape[0], -1)))
    if made.fold is not None:  # last: if anything above fails, the states still match the committed rows
        made.fold(len(path))


def _picked(t: Tensor, rows: Mapping[torch.device, Tensor] | slice) -> Tensor:
    return t[:, rows] if isinstance(rows, slice) else t.index_select(1, rows[t.device])  # half the time of indexing
