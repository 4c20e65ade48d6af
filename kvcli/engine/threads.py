"""What threads compute on: how many of them, torch's own and those of the native kernels, and which GPU."""

from __future__ import annotations

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
