"""Accepted rows of a pass become slots: keys, values and positions of all layers at once, and lengths grow by their
number.

On a GPU (fused.py) one launch serves all layers of one shape, by a table of addresses: `addresses` makes it, and what
it names must stay where it is. `path` and `count` lie on the device, where a pass that draws its own tokens makes
them. In a layer, row path[i] of the pass goes to the slot length[j] + i of head j, for which there is room. Heads whose
positions are one row (`pos_start` the same for all) write the same numbers there.
reference.py says the same of tables as they are, on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant.tables import Table

COLUMNS = 10  # of a layer: k, v, pos, start, length, pos_start, fresh k and v, the strides of heads and of rows
Fresh = Sequence[tuple[Tensor, Tensor]]  # by layer: k [K, M, D], v [K, M, E], both with the same strides but for size


def addresses(tables: Sequence[Table], fresh: Fresh, device: torch.device) -> Tensor:
    """[L, COLUMNS] int64 on the device: where layers of one shape lie, and what a pass made of them."""
    rows = []
    for table, (k, v) in zip(tables, fresh, strict=True):
        assert table.pos is not None, "positions are stored"
        pos_start = table.start if table.pos_start is None else table.pos_start
        held = table.k, table.v, table.pos, table.start, table.length, pos_start, k, v
        d, e = k.shape[2], v.shape[2]
        assert [s * e for s in k.stride()[:2]] == [s * d for s in v.stride()[:2]], "keys and values lie alike"
        assert not any(t.data_ptr() % 16 for t in (table.k, table.v, k, v)), "16 bytes go at a time"
        rows.append([*(t.data_ptr() for t in held), k.stride(0) // d, k.stride(1) // d])
    host = torch.tensor(rows, dtype=torch.int64)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
