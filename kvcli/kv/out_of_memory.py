"""Out-of-memory errors of the KV cache: detection and messages."""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvcli.errors import DoesNotFit, is_out_of_memory


class CacheFull(DoesNotFit):
    """The KV cache has no memory or disk space left. `most`: tokens that fit, if known."""

    code = "out_of_memory"

    def __init__(self, message: str, *, most: int | None = None, **told: Any) -> None:
        super().__init__(message, **told)
        self.most = most


class Preempted(BaseException):
    """Thrown at a pass that did not run, because the KV cache of its sequence was dropped for other sequences. Not an
    Exception, so that no drafter takes it for a failure of its own."""


def as_cache_full(error: Exception) -> CacheFull | None:
    """Convert an out-of-memory or disk-full error to CacheFull; None for other errors."""
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
    """Catch CacheFull in a `with` block and append it to the yielded list.

    Its traceback is removed, because the stack frames keep the tensors of a pass in memory.
    """
    found: list[CacheFull] = []
    try:
        yield found
    except Preempted:
        found.append(CacheFull("other answers took the memory of the KV cache"))
    except Exception as error:
        if (lack := as_cache_full(error)) is None:
            raise
        lack.__context__ = None
        found.append(lack.with_traceback(None))


def free_caches() -> None:
    """Free memory held by the garbage collector and torch's allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
