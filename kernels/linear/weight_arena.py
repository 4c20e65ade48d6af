"""Contiguous memory for the packed weights of a model, in large pages if the system has them."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

PAGE = 2 << 20  # bytes of a large page
PIECE = 64 << 20  # bytes requested from the system at once; pages never written use no memory
LINE = 64  # alignment of a weight, in bytes


class WeightArena:
    """Allocator of weight memory. A piece is freed with the last tensor in it.

    A pass reads every weight once. With pages of 4 KiB a virtual machine walks two page tables for each page, and
    hardware prefetching ends at each page: large pages gave a sixth more bandwidth. Only Linux needs a request for
    them.
    """

    def __init__(self) -> None:
        self._piece: mmap.mmap | None = None
        self._at = self._end = 0

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Allocate an int32 tensor of that shape, not initialized."""
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
