"""Memory for the packed weights of a model, side by side, in large pages where the system has them."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

PAGE = 2 << 20  # of a large page, bytes
PIECE = 64 << 20  # asked of the system at once; what is never written takes no memory
LINE = 64  # where a weight may begin


class WeightArena:
    """Hands out memory that is given back with the last tensor of its piece.

    A pass reads every weight once. With pages of 4 KiB a guest of another system looks up two tables for each, and what
    the CPU prefetches ends with each: large ones gave a sixth more bandwidth. Only Linux has to be asked for them.
    """

    def __init__(self) -> None:
        self._piece: mmap.mmap | None = None
        self._at = self._end = 0

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """int32 of that shape, not filled."""
        count = math.prod(shape)
        if not hasattr(mmap, "MADV_HUGEPAGE") or not count:
            return torch.empty(shape, dtype=torch.int32)
        if self._piece is None or self._at + 4 * count > self._end:
            size = max(PIECE, -(-4 * count // PAGE) * PAGE) + PAGE
            self._piece = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._piece.madvise(mmap.MADV_HUGEPAGE)
            self._at, self._end = -torch.frombuffer(self._piece, dtype=torch.uint8).data_ptr() % PAGE, size
        found = torch.frombuffer(self._piece, dtype=torch.int32, count=count, offset=self._at).view(shape)
        self._at += -(-4 * count // LINE) * LINE
        return found
