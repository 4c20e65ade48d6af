"""Malloc settings that return large freed blocks to the system while weights are loaded or a prompt is prefilled.

glibc raises the size from which blocks get pages of their own to that of the largest one freed, up to 32 MiB. Before
2.38 an aligned block, as torch's are, does not fit where one of its size was. After a long prompt a tenth of the memory
was holes (tests/bench/fit.py). In an answer the same blocks are allocated in every pass, logits of a large vocabulary
above all, and fresh pages would cost more than the rest of the pass. So blocks are kept there, as by default in
glibc.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvcli.kernels.native import native

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE = 1 << 20  # bytes, while loading or prefilling
LARGEST = 32 << 20  # glibc's own limit


@contextmanager
def return_large_blocks() -> Iterator[None]:
    """Return large freed blocks to the system while the context is open, in the whole process. Affects glibc only."""
    _from(LARGE, 128 << 10)
    try:
        yield
    finally:
        if (functions := native()) is not None:
            functions.release()  # a decoding step's own rows need almost none of this memory
        _from(LARGEST, 2 * LARGEST)


def _from(large: int, kept: int) -> None:
    """Set the size from which blocks get pages of their own, and the free bytes that the heap keeps at its end."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, large)
        libc.mallopt(M_TRIM_THRESHOLD, kept)
        libc.malloc_trim(0)
