"""Large blocks of memory go back to the system as soon as they are freed, so that a run takes what lives in it.

glibc raises the size from which on blocks have pages of their own to that of the largest one freed, up to 32 MiB, and
before 2.38 an aligned block, as torch's are, does not fit where one of its size was. Behind a long prompt a tenth of
the memory was holes (tests/bench/fit.py). No native kernel asks for large blocks in each call.
"""

from __future__ import annotations

import ctypes
import sys

M_MMAP_THRESHOLD = -3
LARGE = 1 << 20  # bytes


def give_back_large() -> None:
    """For this process, where glibc makes its blocks; other libraries' ways are left alone."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
