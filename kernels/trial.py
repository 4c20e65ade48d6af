"""What a module of a model gives for trial rows, so that it is known by what it does."""

from __future__ import annotations

from torch import Tensor, nn


def tried(module: nn.Module, x: Tensor) -> Tensor | None:
    """None where it takes, or gives, something else than one tensor of one type."""
    try:
        found = module(x)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return None
    return found if isinstance(found, Tensor) and found.dtype == x.dtype else None
