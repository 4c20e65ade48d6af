"""Ordered results of work that some workers do side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from kvcli.api import Cancel
from kvcli.errors import EngineLost

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered(
    work: Callable[[Item], Result], items: Sequence[Item], workers: int, cancel: Cancel
) -> Iterator[tuple[Item, Callable[[], Result]]]:
    """Yield each item with a function that returns its result or raises its error, in the order of the items.

    `work` runs in as many threads as there are workers, and once more after EngineLost. After `cancel` none begins.
    """

    def attempt(item: Item) -> Result:
        try:
            return work(item)
        except EngineLost:
            return work(item)

    pool = ThreadPoolExecutor(workers, "kvcli-pool")
    futures: list[Future[Result]] = [pool.submit(attempt, item) for item in items]
    try:
        for item, future in zip(items, futures, strict=True):
            while not future.done() and not cancel():
                with suppress(TimeoutError):
                    future.exception(timeout=0.1)
            if not future.done():
                return
            yield item, future.result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
