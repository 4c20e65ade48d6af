"""What fused kernels read of rows and slots: small tables on the device, filled by one copy from the host.

Rows of a pass are a tree. Each of its paths from the root to a leaf lists the rows on it; a row names one path that it
lies on, and how deep. What a row sees of its pass is that path, down to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

LARGEST = 256  # numbers of a key or a value


def fits(d: int, e: int) -> bool:
    """Whether keys of `d` numbers and values of `e` are read: 16 bytes are loaded at a time, 16 numbers multiplied."""
    return not d % 16 and not e % 16 and max(d, e) <= LARGEST


@dataclass(frozen=True, slots=True)
class Table:
    """Where the slots of one layer lie. Indices are int32 and on the device, as is all else."""

    k: Tensor  # [T, D], contiguous: all heads' slots
    v: Tensor  # [T, E]
    pos: Tensor | None  # int32 positions, below 0 = hidden where there is a window; None where no window is asked for
    start: Tensor  # [K] the first slot of each head
    length: Tensor  # [K] slots from there on
    pos_start: Tensor | None = None  # [K] the first position of each head in `pos`; None = as `start`


@dataclass(frozen=True, slots=True)
class Tree:
    """Which rows of its pass each row sees: int32, on the device."""

    path: Tensor  # [P, depth], contiguous: rows from the root down, -1 behind the last
    path_of: Tensor  # [N] -1 = no row: nothing is written
    depth: Tensor  # [N] of a row on its path, 0 = the first
    pos: Tensor  # [M] of all fresh rows, of which the N that ask are the last

    @staticmethod
    def of_rows(parents: Sequence[int], pos: Sequence[int], device: torch.device) -> Tree:
        """Rows with the index of their parent, -1 = none, at these positions; a parent comes before its children."""
        if all(parent == row - 1 for row, parent in enumerate(parents)):
            return Tree.chain(pos, device)
        seen: list[list[int]] = []
        for row, parent in enumerate(parents):
            seen.append([*(seen[parent] if parent >= 0 else []), row])
        return Tree.of_seen(seen, pos, device)

    @staticmethod
    def chain(pos: Sequence[int], device: torch.device) -> Tree:
        """Each row sees itself and all before it."""
        n = len(pos)
        path, path_of, depth, at = uploaded([range(n), [0] * n, range(n), pos], device)
        return Tree(path.view(1, n), path_of, depth, at)

    @staticmethod
    def of_seen(seen: Sequence[Sequence[int]], pos: Sequence[int], device: torch.device) -> Tree:
        """By asking row: all fresh rows that it sees, itself among them, in order."""
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


def uploaded(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """These numbers as int32 on the device, all in one copy that the host does not wait for."""
    ends = [0, *accumulate(-(-len(x) // 4) * 4 for x in lists)]  # each begins at a multiple of 16 bytes
    host = torch.zeros(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for a, x in zip(ends, lists, strict=False):
        host[a : a + len(x)] = torch.tensor(x, dtype=torch.int32)
    there = host.to(device, non_blocking=True)
    return [there[a : a + len(x)] for a, x in zip(ends, lists, strict=False)]
