"""Background work while the user types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from kvcli.api import Cancel


@contextmanager
def in_background(work: Callable[[Cancel], object], tell: Callable[[Exception], object]) -> Iterator[None]:
    """Run `work` in a thread until the block ends; then `cancel()` is True. Its error goes to `tell` afterwards."""
    is_over = Event()
    with ThreadPoolExecutor(1, "kvcli-idle") as pool:
        done = pool.submit(work, is_over.is_set)
        try:
            yield
        finally:
            is_over.set()
    if isinstance(error := done.exception(), Exception):
        tell(error)
