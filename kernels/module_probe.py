"""Identify a model's modules by their outputs for probe rows, and group the modules that compute the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from types import MethodType
from typing import TypeVar

from torch import Tensor, nn

# Errors by which a module of any origin rejects rows of the wrong shape or type
REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, ArithmeticError)
T = TypeVar("T")


def probe_output(module: Callable[[Tensor], object], x: Tensor) -> Tensor | None:
    """Return the module's output, or None if it does not map one tensor to one tensor of the same dtype."""
    try:
        found = module(x)
    except REFUSALS:
        return None
    return found if isinstance(found, Tensor) and found.dtype == x.dtype else None


def kind(module: nn.Module) -> Hashable:
    """Return a key of all that determines a module's function, apart from its weights; one probe serves all equal keys.

    The key holds classes, settings, shapes and dtypes, also of submodules; other objects are compared by identity. The
    layer index is left out, because it differs in all layers.
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
    """Group the items by kind, in their order."""
    found: dict[Hashable, list[T]] = {}
    for one in these:
        found.setdefault(kind_of(one), []).append(one)
    return list(found.values())


def first_and_last(group: Sequence[T]) -> Sequence[T]:
    """Return the modules of a group to probe in place of all: the first and the last, as a model's ends may differ."""
    return group if len(group) < 3 else (group[0], group[-1])


_NO_SETTINGS = {"_parameters", "_buffers", "_modules", "training", "layer_idx"}


def _setting(value: object) -> Hashable:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_setting, value))
    if isinstance(value, set | dict):  # mostly empty dicts of hooks
        return frozenset(map(_setting, value.items() if isinstance(value, dict) else value))
    if isinstance(value, partial | slice):
        return _setting(value.__reduce__())  # the type and all that it was made of
    if isinstance(value, MethodType):
        return id(value.__func__)
    found: Hashable = getattr(value, "kind", id(value))  # a replaced forward states its kind
    return found
