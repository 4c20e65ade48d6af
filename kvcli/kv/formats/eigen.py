"""Eigenvectors of products of keys or values, with a check that these are finite."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.errors import BadModel


def eigenvectors(x: Tensor) -> Tensor:
    """Return eigenvectors of symmetric x [.., n, n] as columns, largest last. Raises BadModel if x is not finite."""
    # LAPACK reports no error for NaN at most sizes
    if not x.is_meta and not bool(x.isfinite().all()):
        raise BadModel(
            "the model's keys or values are not numbers",
            code="bad_slots",
            lines=["this KV format needs singular vectors, which NaN or infinity do not have"],
            try_=["--set load.dtype=fp32", "download the model again: its weights may be damaged"],
        )
    found: Tensor = torch.linalg.eigh(x).eigenvectors
    return found
