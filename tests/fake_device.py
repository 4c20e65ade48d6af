"""A device with as much memory as a test gives it, which runs out when the test says so; and a tier that rounds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcli.kv.slots import Slots
from kvcli.kv.tiers.dense import Dense


class FakeDevice(TorchDispatchMode):
    """While it is active, every new tensor is an allocation: counted, held against a budget, failed on demand.

    An allocation is an operation whose result has memory of its own; views and changes in place are none. What was
    allocated before is not counted, and what is let go is given back.
    """

    def __init__(self, *, budget: int | None = None, fail_at: int | None = None) -> None:
        """`budget`: bytes. `fail_at`: which allocation fails, the first being 0; only that one does."""
        super().__init__()
        self.budget, self.fail_at = budget, fail_at
        self.allocations = 0
        self.live = self.peak = 0  # bytes
        self.failed = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and _storage(t) not in known:
                known.add(_storage(t))
                self._allocate(t)
        return out

    def _allocate(self, t: torch.Tensor) -> None:
        n, size = self.allocations, t.untyped_storage().nbytes()
        self.allocations += 1
        is_full = self.budget is not None and self.live + size > self.budget
        if n == self.fail_at or is_full:
            self.failed += 1
            raise torch.OutOfMemoryError(f"the fake device is out of memory: {size} bytes")
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(t.untyped_storage(), self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


class Rounding(Dense):
    """Stands for a packed tier: what comes down is rounded to bfloat16, and read in the numbers of the rows."""

    def take(self, layer: int, slots: Slots) -> None:
        low = (t.to(torch.bfloat16).to(t.dtype) for t in (slots.k, slots.v))
        super().take(layer, Slots(*low, slots.pos))
