"""Commit the accepted rows of a pass: store their KV and positions in all layers at once, and increase lengths.

On a GPU (fused.py) one launch serves all layers of one shape, by a table of addresses from `addresses`; the named
tensors must not be moved. `path` and `count` are on the device, where a pass that samples its own tokens computes them.
In a layer, row path[i] of the pass becomes slot length[j] + i of head j; the caller ensures the capacity. Heads that
share one row of positions (equal `pos_start`) write the same numbers there.
reference.py specifies the same for tables of tensors, on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant.tables import Table

COLUMNS = 10  # of a layer: k, v, pos, start, length, pos_start, new k and v, the strides of heads and of rows
# by layer: new k [K, M, D], v [K, M, E], both with the same strides but for size
Fresh = Sequence[tuple[Tensor, Tensor]]


def addresses(tables: Sequence[Table], fresh: Fresh, device: torch.device) -> Tensor:
    """Return [L, COLUMNS] int64 on the device: addresses of the slots and of the new KV of layers of one shape."""
    rows = []
    for table, (k, v) in zip(tables, fresh, strict=True):
        assert table.pos is not None, "positions are stored"
        pos_start = table.start if table.pos_start is None else table.pos_start
        held = table.k, table.v, table.pos, table.start, table.length, pos_start, k, v
        d, e = k.shape[2], v.shape[2]
        assert [s * e for s in k.stride()[:2]] == [s * d for s in v.stride()[:2]], "keys and values have one layout"
        assert not any(t.data_ptr() % 16 for t in (table.k, table.v, k, v)), "16 bytes go at a time"
        rows.append([*(t.data_ptr() for t in held), k.stride(0) // d, k.stride(1) // d])
    host = torch.tensor(rows, dtype=torch.int64)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
