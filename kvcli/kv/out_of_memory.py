"""Memory has run out: how that is told from other errors, and said."""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvcli.errors import DoesNotFit, is_out_of_memory


class CacheFull(DoesNotFit):
    """There is no room for more keys and values. `most`: tokens there is room for, where that is known."""

    code = "out_of_memory"

    def __init__(self, message: str, *, most: int | None = None, **told: Any) -> None:
        super().__init__(message, **told)
        self.most = most


def as_cache_full(error: Exception) -> CacheFull | None:
    """The error as a lack of room, in memory or on the disk; None if it is anything else."""
    if isinstance(error, CacheFull):
        return error
    first = str(error).strip().split("\n")[0]
    if is_out_of_memory(error):
        return CacheFull("out of memory", lines=[first] if first else [])
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return CacheFull(f"the disk is full: {error.strerror}", lines=[first])
    return None


@contextmanager
def catch_cache_full() -> Iterator[list[CacheFull]]:
    """Goes on behind the block where it runs out of room; the list then has the lack.

    Without the frames that it came through: they hold on to the tensors of a pass.
    """
    found: list[CacheFull] = []
    try:
        yield found
    except Exception as error:
        if (lack := as_cache_full(error)) is None:
            raise
        lack.__context__ = None
        found.append(lack.with_traceback(None))


def free_caches() -> None:
    """Give back what only the garbage collector and torch's allocator still hold."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
