"""What layers get as their cache in a call of a model, and of which pass it is: both reach those that drop keywords."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import Any

from torch import Tensor


class Trial:
    """What layers get as their cache in one call of a model: only what they ask of one, and no transformers Cache.

    It stores nothing: keys and values are handed on to attention, whose pass knows the past.
    """

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()  # by layer, of which it has none
    layers: tuple[object, ...] = ()

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [1, K, N, D] of the rows of the call, as they came."""
        return k, v

    def fold(self, i: int) -> Callable[[int], None] | None:
        """What has the states of its i-th text take in so many of its rows (mixers.py); None = there are none."""
        return None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: rows bring their positions, and those of several texts in one call have no common past.

        Nor may a recorded call ask how long one is.
        """
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0, as above."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys a mask is over, and where they begin: the rows of the call."""
        return query_length, 0


@lru_cache(64)
def cache_name(model: Any) -> str | None:
    """What this class calls its cache: renamed in transformers 5.24, which warns in each call under the old name."""
    told = signature(getattr(model, "forward", model)).parameters
    return next((name for name in ("cache", "past_key_values") if name in told), None)


class _Stack(threading.local):
    """Of each thread its own: engines in two threads know nothing of each other, over one model or several."""

    def __init__(self) -> None:
        self.passes: list[object] = []


_stack = _Stack()  # a registered function is all that a model calls: what it finds its pass by is a process's, too


@contextmanager
def under_way(its_pass: object) -> Iterator[None]:
    """For the length of a call it is of this pass, or of what travels in its place; None = of none."""
    _stack.passes.append(its_pass)
    try:
        yield
    finally:
        _stack.passes.pop()


def current() -> Any:
    """Of which pass the innermost call of this thread is; None = of none."""
    return _stack.passes[-1] if _stack.passes else None
