"""How many threads compute: torch's own and those of the native kernels, which take turns."""

from __future__ import annotations

import torch

from kvcli.kernels.native import native


def use_threads(n: int) -> None:
    """From now on, in the whole process."""
    torch.set_num_threads(n)
    if (kernels := native()) is not None:
        kernels.use_threads(n)
