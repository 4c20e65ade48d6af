"""What threads compute on: how many of them, torch's own and those of the native kernels, and which GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvcli.kernels.native import native


def use_device(device: torch.device) -> None:
    """From now on, in this thread: Triton launches where the thread is, wherever the tensors are."""
    if device.index:  # every thread begins with the first one
        torch.cuda.set_device(device)


def use_threads(n: int) -> None:
    """From now on, in the whole process."""
    torch.set_num_threads(n)
    if (kernels := native()) is not None:
        kernels.use_threads(n)


@contextmanager
def one_pool(has_pool: bool) -> Iterator[None]:
    """Torch's own operations on this thread alone, where a model `has_pool`, the native one with threads of its own.

    Torch's threads spin for milliseconds behind each operation that they share. In a step of one token the native
    layers find a core taken then: two threads were as slow as one.
    """
    n = torch.get_num_threads()
    torch.set_num_threads(1 if has_pool else n)
    try:
        yield
    finally:
        torch.set_num_threads(n)
