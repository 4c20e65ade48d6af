"""Sliding windows: eviction, at compression points, of slots that no later row attends to.

A slot outside the window of every later row is hidden from them all, so evicting it changes no result. A sequence that
is rolled back further is prefilled again, because the evicted slots are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.kernels.attend_invariant import BLOCK

if TYPE_CHECKING:
    from kvcli.kv.slots import AttentionParams, LayerShape


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding window of a layer, and the margin kept before it."""

    size: int  # tokens: a row at position p sees positions > p - size
    back: int = 192  # tokens that can be rolled back, on disk too: enough to replace the last question

    def window_start(self, end: int) -> int:
        """Return the position below which slots can be evicted if no later row is before `end`."""
        return max(0, (end - self.size - self.back) // self.step * self.step)

    def most(self, answer: int, chunk: int) -> int:
        """Return the most slots per head for prefill chunks of `chunk` tokens and an answer of `answer` tokens."""
        return max(self.size + self.back + self.step + answer, chunk + BLOCK)

    @property
    def step(self) -> int:
        """Slots evicted together, at most one kernel block."""
        return min(self.back, BLOCK)


class Windows:
    """Sliding windows of the layers of a KV cache, and the eviction position of each."""

    def __init__(self, of: Mapping[int, Window]) -> None:
        self._of = dict(of)  # by layer; other layers keep all slots
        self._opened: dict[int, int] = {}  # by layer: position

    def __contains__(self, layer: int) -> bool:
        return layer in self._of

    def evict_below(self, layer: int, end: int) -> int:
        """Return the position below which to evict slots if no later row is before `end`; 0 = evict none."""
        low = self._of[layer].window_start(end) if layer in self._of else 0
        if low <= self._opened.get(layer, 0):
            return 0
        self._opened[layer] = low
        return low

    def came(self, layer: int, start: int) -> None:
        """Note that slots from `start` on were stored. The first slots of a long chunk may already be hidden."""
        if start < self._opened.get(layer, 0):
            del self._opened[layer]

    def reaches(self, n: int, stored: Callable[[int], Iterable[Tensor]]) -> bool:
        """True if all slots in the windows of a row at n exist; `stored`: positions [K, S] of a layer, by tier."""

        def has_all(layer: int, first: int) -> bool:
            found = sum(((pos >= first) & (pos < n)).sum(1) for pos in stored(layer))
            return bool(torch.as_tensor(found == n - first).all())

        return all(has_all(layer, max(0, n - window.size + 1)) for layer, window in self._of.items())

    def clear(self) -> None:
        """Reset after a rollback, because later slots must be evicted again."""
        self._opened.clear()


def windows_of(shapes: Sequence[LayerShape], attention_params: Sequence[AttentionParams]) -> dict[int, Window]:
    """Return the largest window of each storing layer; layers with full attention are left out."""
    size: dict[int, int | None] = {}
    for layer, (shape, sight) in enumerate(zip(shapes, attention_params, strict=True)):
        holder = layer if shape.shared_from is None else shape.shared_from
        of, here = size.get(holder, 0), sight.window
        size[holder] = None if of is None or here is None else max(of, here)
    return {layer: Window(n) for layer, n in size.items() if n is not None}
