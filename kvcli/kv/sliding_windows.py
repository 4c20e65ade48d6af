"""Sliding windows: slots that no row to come can see, which a store gives back at boundaries.

A slot behind the window of every later row is hidden from them all, so no number changes when it goes. What was read
cannot be undone beyond it: a text that goes back further is read again.
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
    """What rows of a layer see, and what is kept behind it."""

    size: int  # tokens: a row at position p sees positions > p - size
    back: int = 192  # tokens that may be undone all the same, on disk too: a last question, and another in its place

    def window_start(self, end: int) -> int:
        """The position below which slots may go when no row stands before `end`."""
        return max(0, (end - self.size - self.back) // self.step * self.step)

    def most(self, answer: int, chunk: int) -> int:
        """Slots a head at most, behind a prompt that is read in chunks of so many and an answer of so many tokens."""
        return max(self.size + self.back + self.step + answer, chunk + BLOCK)

    @property
    def step(self) -> int:
        """Slots that go together, at most a block, as rows read them."""
        return min(self.back, BLOCK)


class Windows:
    """The windows of a store's layers, and how far each was given back."""

    def __init__(self, of: Mapping[int, Window]) -> None:
        self._of = dict(of)  # by layer; others keep everything
        self._opened: dict[int, int] = {}  # by layer: position

    def __contains__(self, layer: int) -> bool:
        return layer in self._of

    def evict_below(self, layer: int, end: int) -> int:
        """The position below which slots are to go now, when no row stands before `end`; 0 = none are."""
        low = self._of[layer].window_start(end) if layer in self._of else 0
        if low <= self._opened.get(layer, 0):
            return 0
        self._opened[layer] = low
        return low

    def came(self, layer: int, start: int) -> None:
        """Slots at positions from `start` on were stored: of a long chunk the first may be hidden already."""
        if start < self._opened.get(layer, 0):
            del self._opened[layer]

    def reaches(self, n: int, stored: Callable[[int], Iterable[Tensor]]) -> bool:
        """Whether a row at position n finds all that it sees; `stored`: of a layer, positions [K, S] by tier."""

        def has_all(layer: int, first: int) -> bool:
            found = sum(((pos >= first) & (pos < n)).sum(1) for pos in stored(layer))
            return bool(torch.as_tensor(found == n - first).all())

        return all(has_all(layer, max(0, n - window.size + 1)) for layer, window in self._of.items())

    def clear(self) -> None:
        """Slots were undone: what comes next may have to give back again."""
        self._opened.clear()


def windows_of(shapes: Sequence[LayerShape], sights: Sequence[AttentionParams]) -> dict[int, Window]:
    """By layer that stores: the window of the rows that look furthest back in it; none where one sees all."""
    size: dict[int, int | None] = {}
    for layer, (shape, sight) in enumerate(zip(shapes, sights, strict=True)):
        holder = layer if shape.shared_from is None else shape.shared_from
        of, here = size.get(holder, 0), sight.window
        size[holder] = None if of is None or here is None else max(of, here)
    return {layer: Window(n) for layer, n in size.items() if n is not None}
