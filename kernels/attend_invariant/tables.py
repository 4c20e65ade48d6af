"""Device tables of rows and slots for fused kernels, filled by one copy from the host.

The rows of a pass are a tree. Each path from the root to a leaf lists its rows; a row has one path that contains it,
and its depth there. In its pass, a row sees that path down to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

LARGEST = 256  # size of a key or value


def fits(d: int, e: int) -> bool:
    """True if keys of size `d` and values of size `e` are supported: 16 bytes are loaded, 16 numbers multiplied."""
    return not d % 16 and not e % 16 and max(d, e) <= LARGEST


@dataclass(frozen=True, slots=True)
class Table:
    """Location of the slots of one layer. All tensors are on the device, indices are int32."""

    k: Tensor  # [T, D], contiguous: all heads' slots
    v: Tensor  # [T, E]
    pos: Tensor | None  # int32 positions, below 0 = hidden if there is a window; None if no window is used
    start: Tensor  # [K] the first slot of each head
    length: Tensor  # [K] number of slots from there on
    pos_start: Tensor | None = None  # [K] the first position of each head in `pos`; None = as `start`


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows of the pass that each row sees: int32, on the device."""

    path: Tensor  # [P, depth], contiguous: rows from the root down, -1 after the last
    path_of: Tensor  # [N] path of each row; -1 = unused row, whose output is not written
    depth: Tensor  # [N] depth of a row on its path, 0 = the first
    pos: Tensor  # [M] positions of all new rows, the last N of which are the query rows

    @staticmethod
    def of_rows(parents: Sequence[int], pos: Sequence[int], device: torch.device) -> Tree:
        """Build the tree from each row's parent index, -1 = none, and positions; a parent comes before its children."""
        if all(parent == row - 1 for row, parent in enumerate(parents)):
            return Tree.chain(pos, device)
        seen: list[list[int]] = []
        for row, parent in enumerate(parents):
            seen.append([*(seen[parent] if parent >= 0 else []), row])
        return Tree.of_seen(seen, pos, device)

    @staticmethod
    def chain(pos: Sequence[int], device: torch.device) -> Tree:
        """Build a chain: each row sees itself and all rows before it."""
        n = len(pos)
        path, path_of, depth, at = uploaded([range(n), [0] * n, range(n), pos], device)
        return Tree(path.view(1, n), path_of, depth, at)

    @staticmethod
    def of_seen(seen: Sequence[Sequence[int]], pos: Sequence[int], device: torch.device) -> Tree:
        """Build the tree from the new rows that each query row sees, itself among them, in order."""
        paths: list[Sequence[int]] = []
        path_of = [0] * len(seen)
        for row in sorted(range(len(seen)), key=lambda row: -len(seen[row])):
            mine = seen[row]
            on = next((i for i, path in enumerate(paths) if path[: len(mine)] == mine), len(paths))
            if on == len(paths):
                paths.append(mine)
            path_of[row] = on
        deep = max(map(len, paths))
        flat = [row for path in paths for row in (*path, *[-1] * (deep - len(path)))]
        path, *rest = uploaded([flat, path_of, [len(mine) - 1 for mine in seen], pos], device)
        return Tree(path.view(len(paths), deep), *rest)


def sent(t: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device. A copy from memory that is not pinned would wait for all work there."""
    return (t.pin_memory() if device.type == "cuda" else t).to(device, non_blocking=True)


def uploaded(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Copy these numbers to the device as int32, all in one copy without waiting."""
    ends = [0, *accumulate(-(-len(x) // 4) * 4 for x in lists)]  # each begins at a multiple of 16 bytes
    host = torch.zeros(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for a, x in zip(ends, lists, strict=False):
        host[a : a + len(x)] = torch.tensor(x, dtype=torch.int32)
    there = host.to(device, non_blocking=True)
    return [there[a : a + len(x)] for a, x in zip(ends, lists, strict=False)]
