"""Rows over stored slots and each other, with all numbers that change from pass to pass on the device.

What a pass that is recorded once attends with: nothing is asked of the host, shapes depend on sizes of buffers alone,
and where a head ends, or which rows are a row's ancestors, is read where it lies. `append` makes slots of rows in the
same way, so that a device can go on by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvcli.kernels.attend_fixed import reference


@dataclass(frozen=True, slots=True)
class Table:
    """Stored slots of one layer; heads may lie anywhere and differ in length."""

    k: Tensor  # [T, D]: all heads' slots
    v: Tensor  # [T, E]
    pos: Tensor  # [P] int32
    start: Tensor  # [K] int32: a head's first slot in k and v
    length: Tensor  # [K] int32: slots from there on
    pos_start: Tensor  # [K] int32: its first position


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows of a pass as paths from the pending token down: a chain is one path."""

    path: Tensor  # [P, depth] int32: rows of each path, the pending one first; -1 behind the last
    path_of: Tensor  # [N] int32: a path that a row lies on; -1 = an unused row, which sees nothing
    depth: Tensor  # [N] int32: its place there
    pos: Tensor  # [N] int32: its position


def attend_fixed(
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
    return reference.attend_fixed(
        q, table, k, v, tree, scale, capacity=capacity, softcap=softcap, window=window, sink=sink
    )


def append(tables: Sequence[Table], fresh: Sequence[tuple[Tensor, Tensor]], path: Tensor, pos: Tensor) -> None:
    """Rows path [F] int32, the first ones of it, -1 behind them, become slots behind those of each table, which has
    room for F more; `length` grows by as many. `fresh`: k [K, N, D] and v [K, N, E] of each; pos [N] of the rows.
    """
    reference.append(tables, fresh, path, pos)
