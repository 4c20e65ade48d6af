"""What a module of a model gives for trial rows, so that it is known by what it does; and which modules do the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from types import MethodType
from typing import TypeVar

from torch import Tensor, nn

# How a module, which may be anybody's, says that rows are not what it takes
REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, ArithmeticError)
T = TypeVar("T")


def probe_output(module: nn.Module, x: Tensor) -> Tensor | None:
    """None where it takes, or gives, something else than one tensor of one type."""
    try:
        found = module(x)
    except REFUSALS:
        return None
    return found if isinstance(found, Tensor) and found.dtype == x.dtype else None


def kind(module: nn.Module) -> Hashable:
    """All that says what a module computes, but for its weights: modules of a kind need no trial each.

    Classes, settings, shapes and types, and those of what is inside; what cannot be compared is alike where it is the
    same object. The index of a layer is left out: no two have the same.
    """
    own = {k: v for k, v in vars(module).items() if k not in _NO_SETTINGS}
    tensors = {**module._parameters, **module._buffers}
    return (
        type(module),
        tuple((k, _setting(v)) for k, v in sorted(own.items())),
        tuple((k, None if t is None else (type(t), t.shape, t.dtype)) for k, t in sorted(tensors.items())),
        tuple((name, kind(child)) for name, child in module.named_children()),
    )


def group_by_kind(these: Iterable[T], kind_of: Callable[[T], Hashable]) -> list[list[T]]:
    """Grouped by kind, in their order."""
    found: dict[Hashable, list[T]] = {}
    for one in these:
        found.setdefault(kind_of(one), []).append(one)
    return list(found.values())


def first_and_last(group: Sequence[T]) -> Sequence[T]:
    """Those of a kind that are tried in place of all: the first and the last, as models differ at their ends."""
    return group if len(group) < 3 else (group[0], group[-1])


_NO_SETTINGS = {"_parameters", "_buffers", "_modules", "training", "layer_idx"}


def _setting(value: object) -> Hashable:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_setting, value))
    if isinstance(value, set | dict):  # what there are most of: empty ones, of hooks
        return frozenset(map(_setting, value.items() if isinstance(value, dict) else value))
    if isinstance(value, partial):
        return _setting((value.func, value.args, value.keywords))
    if isinstance(value, MethodType):
        return id(value.__func__)
    found: Hashable = getattr(value, "kind", id(value))  # what took the place of a forward says of which kind it is
    return found
