"""Commit: move the KV of accepted rows from a forward pass into the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.forward_request import Rows
from kvcli.kv.slots import Slots

if TYPE_CHECKING:
    from kvcli.engine.forward_request import ForwardResult
    from kvcli.kv.slots import KVCache

# Verification of draft tokens: sample first, then match.
#
# At each node the sampler draws the next token as if there were no draft. If a child of the node has that token,
# verification continues there; otherwise it ends. So the text never depends on the draft tokens.
# SpecInfer, arXiv 2305.09781, describes the tree walk.


def accepted_path(rows: Rows, drawn: Callable[[int], int], stop: Collection[int] = ()) -> tuple[list[int], list[int]]:
    """Return the accepted rows, row 0 first, and one new id per row; the last id is the next pending token.

    `drawn(row)` is the token sampled after a row. The path ends at the first of `stop`.
    """
    below = rows.children()
    path, new = [0], [drawn(0)]
    while new[-1] not in stop:
        match = next((row for row in below[path[-1]] if rows.ids[row] == new[-1]), None)
        if match is None:
            break
        path.append(match)
        new.append(drawn(match))
    return path, new


def commit(kv: KVCache, rows: Rows, result: ForwardResult, path: Sequence[int]) -> None:
    """Store the keys and values of these rows in each layer that they ran through."""
    if not path:
        return
    if result.commit_rows is not None:
        result.commit_rows(path)
        return
    devices = {fresh.k.device for fresh in result.fresh.values()}
    is_run = path[-1] - path[0] == len(path) - 1
    is_all = is_run and len(path) == rows.n_rows
    accepted = slice(path[0], path[-1] + 1) if is_run else {d: torch.tensor(path, device=d) for d in devices}
    pos = rows.pos if is_all else [rows.pos[row] for row in path]
    has_gaps = pos[-1] - pos[0] != len(pos) - 1  # rows in between were pruned
    at = {d: torch.tensor(pos, dtype=torch.int32, device=d) for d in devices} if has_gaps else None
    for layer, fresh in result.fresh.items():
        k = fresh.k if is_all else _picked(fresh.k, accepted)
        v = k if fresh.v is fresh.k else fresh.v if is_all else _picked(fresh.v, accepted)
        if at is None:
            kv.append(layer, k, v, pos[0])
        else:
            kv.take(layer, Slots(k, v, at[k.device].expand(k.shape[0], -1)))
    if result.fold is not None:  # last: if anything above fails, the states still match the committed rows
        result.fold(len(path))


def _picked(t: Tensor, rows: Mapping[torch.device, Tensor] | slice) -> Tensor:
    # index_select takes half as long as indexing
    return t[:, rows] if isinstance(rows, slice) else t.index_select(1, rows[t.device])
