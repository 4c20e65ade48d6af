"""Threads and devices of computation: the number of CPU threads (torch and native kernels), and the current GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvcli.kernels.native import native


def use_device(device: torch.device) -> None:
    """Make this the current CUDA device of this thread. Triton launches on the current device, wherever the tensors
    are."""
    if device.index:  # a thread starts on device 0
        torch.cuda.set_device(device)


def use_threads(n: int) -> None:
    """Set the number of threads for the whole process."""
    torch.set_num_threads(n)
    if (kernels := native()) is not None:
        kernels.use_threads(n)


@contextmanager
def one_pool(has_pool: bool) -> Iterator[None]:
    """Run torch's operations on one thread if the model has a native thread pool (`has_pool`).

    Torch's threads spin for milliseconds after each shared operation and keep a core busy. In a pass of one token the
    native layers then lack that core: two threads were as slow as one.
    """
    n = torch.get_num_threads()
    torch.set_num_threads(1 if has_pool else n)
    try:
        yield
    finally:
        torch.set_num_threads(n)
