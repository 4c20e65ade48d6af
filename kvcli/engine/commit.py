"""Rows that were accepted become slots: their keys and values go from a pass to the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.rows import places

if TYPE_CHECKING:
    from kvcli.engine.feed import Made
    from kvcli.engine.rows import Rows
    from kvcli.kv.slots import Store


def commit(kv: Store, rows: Rows, made: Made, path: Sequence[int]) -> None:
    """Store keys and values of these rows, in each layer of those that reached it."""
    found: dict[int, list[tuple[Tensor | slice | None, int]]] = {}  # layers reached by the same rows share one list
    for layer, fresh in made.fresh.items():
        if id(fresh.rows) not in found:
            found[id(fresh.rows)] = list(_runs(rows.pos, fresh.rows, path, fresh.k.device))
        for taken, start in found[id(fresh.rows)]:
            k, v = (fresh.k, fresh.v) if taken is None else (fresh.k[:, taken], fresh.v[:, taken])
            kv.append(layer, k, v, start)


def _runs(
    pos: Sequence[int], reached: Sequence[int] | None, path: Sequence[int], device: torch.device
) -> Iterator[tuple[Tensor | slice | None, int]]:
    """Rows of a path by runs of positions: where they lie among those that reached a layer (None = all of them), and
    where each run begins. A run of all who did is None."""
    n = len(pos if reached is None else reached)
    there = path if reached is None else sorted(set(path).intersection(reached))
    at = places(there, reached)
    ends = [i for i in range(1, len(there)) if pos[there[i]] != pos[there[i - 1]] + 1]
    for a, b in pairwise([0, *ends, len(there)]):
        if a < b:
            is_slice = at[b - 1] - at[a] == b - a - 1
            some = slice(at[a], at[b - 1] + 1) if is_slice else torch.tensor(at[a:b], device=device)
            yield None if is_slice and b - a == n else some, pos[there[a]]
