"""Rows that were accepted become slots: their keys and values go from a pass to the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.rows import places
from kvcli.kv.slots import Slots

if TYPE_CHECKING:
    from kvcli.engine.feed import Made
    from kvcli.engine.rows import Rows
    from kvcli.kv.slots import Store


def commit(kv: Store, rows: Rows, made: Made, path: Sequence[int]) -> None:
    """Store keys and values of these rows, in each layer of those that reached it."""
    found: dict[int, tuple[Tensor | slice | None, Sequence[int]]] = {}  # layers reached by the same rows share one
    for layer, fresh in made.fresh.items():
        if id(fresh.rows) not in found:
            found[id(fresh.rows)] = _taken(rows.pos, fresh.rows, path, fresh.k.device)
        taken, pos = found[id(fresh.rows)]
        k, v = (fresh.k, fresh.v) if taken is None else (_picked(fresh.k, taken), _picked(fresh.v, taken))
        if pos and pos[-1] - pos[0] == len(pos) - 1:
            kv.append(layer, k, v, pos[0])
        elif pos:  # with gaps, of which a prompt that is pruned has hundreds
            at = torch.tensor(pos, dtype=torch.int32, device=k.device)
            kv.take(layer, Slots(k, v, at.expand(k.shape[0], -1)))


def _picked(t: Tensor, rows: Tensor | slice) -> Tensor:
    return t[:, rows] if isinstance(rows, slice) else t.index_select(1, rows)  # in half the time of an index


def _taken(
    pos: Sequence[int], reached: Sequence[int] | None, path: Sequence[int], device: torch.device
) -> tuple[Tensor | slice | None, Sequence[int]]:
    """Where rows of a path lie among those that reached a layer (None = they are all who did), and their positions."""
    if reached is None and path == range(len(pos)) and isinstance(pos, range):  # a prompt's, as long as they come
        return None, pos
    there = path if reached is None else sorted(set(path).intersection(reached))
    at, of = places(there, reached), [pos[row] for row in there]
    if not at or at[-1] - at[0] != len(at) - 1:
        return torch.tensor(at, device=device, dtype=torch.int64), of
    return (None if len(at) == len(pos if reached is None else reached) else slice(at[0], at[-1] + 1)), of
