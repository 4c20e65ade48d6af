"""While weights or a prompt are read, large blocks of memory go back to the system: a run takes what lives in it.

glibc raises the size from which on blocks have pages of their own to that of the largest one freed, up to 32 MiB, and
before 2.38 an aligned block, as torch's are, does not fit where one of its size was. Behind a long prompt a tenth of
the memory was holes (tests/bench/fit.py). In an answer the same blocks come again in every pass, logits of a large
vocabulary above all, and their pages would cost more than the rest of it: there they are kept, as glibc would.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvcli.kernels.native import native

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE = 1 << 20  # bytes, while something is read
LARGEST = 32 << 20  # glibc's own limit


@contextmanager
def return_large_blocks() -> Iterator[None]:
    """For the whole process, where glibc makes its blocks; other libraries' ways are left alone."""
    _from(LARGE, 128 << 10)
    try:
        yield
    finally:
        if (functions := native()) is not None:
            functions.release()  # a step's own rows need next to nothing of it
        _from(LARGEST, 2 * LARGEST)


def _from(large: int, kept: int) -> None:
    """Blocks so large have pages of their own, and the heap keeps so many bytes at its end."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, large)
        libc.mallopt(M_TRIM_THRESHOLD, kept)
        libc.malloc_trim(0)
