"""Commit accepted rows in plain PyTorch: the specification of `append_kv`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcli.kernels.append_kv import Fresh
from kvcli.kernels.attend_invariant.tables import Table


def append_kv(tables: Sequence[Table], fresh: Fresh, path: Tensor, count: Tensor, row_pos: Tensor) -> None:
    """Store the first count [1] rows of path [F] int32, which are rows of the pass; row_pos [M] int32."""
    rows = path[: int(count)].long()
    for table, (k, v) in zip(tables, fresh, strict=True):
        pos_start = table.start if table.pos_start is None else table.pos_start
        for j in range(k.shape[0]):
            at, there = int(table.start[j] + table.length[j]), int(pos_start[j] + table.length[j])
            table.k[at : at + len(rows)] = k[j, rows]
            table.v[at : at + len(rows)] = v[j, rows]
            assert table.pos is not None
            table.pos[there : there + len(rows)] = row_pos[rows]
        table.length.add_(count)
