"""What a module of a model gives for trial rows, so that it is known by what it does."""

from __future__ import annotations

from torch import Tensor, nn

# How a module, which may be anybody's, says that rows are not what it takes
REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, ArithmeticError)


def tried(module: nn.Module, x: Tensor) -> Tensor | None:
    """None where it takes, or gives, something else than one tensor of one type."""
    try:
        found = module(x)
    except REFUSALS:
        return None
    return found if isinstance(found, Tensor) and found.dtype == x.dtype else None
