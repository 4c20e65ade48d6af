"""Gates stand in the places of decoder layers in transformers' own loop, and let on the rows that a pruner names.

They are put up for the first pass with a pruner; one without goes straight through. Rows that stay behind are no longer
computed, and rows further on do not see them: the same as a mask that hides them from there on (tests/test_gate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import ismethod
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakMethod

import torch
from torch import Tensor

from kvcli.engine.rows import places

if TYPE_CHECKING:
    from kvcli.engine.feed import Fresh

_CARRY = {"position_embeddings": -2, "position_ids": -1}  # what a layer is told of each row, and in which dimension


@dataclass(frozen=True, slots=True)
class Live:
    """What a pruner is shown before a layer."""

    rows: Sequence[int]  # of the feed, rising: those on their way
    fresh: Fresh | None  # what the layer before made; None before the first
    queries: Tensor | None  # [H, len(hear), D], of the heard rows there


class Pruner(Protocol):
    """Narrows the rows of one feed between layers (LazyLLM, arXiv 2407.14057). Rows are indices into the feed's.

    Before each layer it is asked `before`, told `left`, then asked `revive`. Rows that are wanted or heard must go
    through every layer, and a row may come back as soon as the first layer has been: so what was left behind by an
    earlier pass comes back as a row of this feed that is dropped at once, and revived where its hidden state belongs.
    A row older than what is stored takes a `past` that hides from it what is newer: stores show a row all they hold.
    A pass that broke among those of other texts is made again: with the first layer all begins anew.
    """

    def before(self, layer: int, live: Live) -> Sequence[int] | None:
        """Which live rows go on into this layer, at least one; None = all."""

    def left(self, layer: int, rows: Sequence[int], hidden: Tensor) -> None:
        """Rows that stay behind, and their hidden states [n, E]: what this layer would have been given."""

    def revive(self, layer: int) -> tuple[Sequence[int], Tensor] | None:
        """Rows that come back into this layer, none of them live, and their hidden states [n, E]."""


class Gate:
    """One layer of a model, given the rows of a pass that go on into it."""

    def __init__(self, layer: int, forward: Callable[..., Any], *, is_last: bool) -> None:
        """`forward`: the layer's own, held weakly: a layer that held itself would outlive its model."""
        self._layer, self._is_last = layer, is_last
        # what accelerate puts in its place is no method, and holds the layer anyway
        self._forward = WeakMethod(forward) if ismethod(forward) else lambda: forward

    def __call__(self, hidden_states: Tensor, *args: Any, **told: Any) -> Any:
        """hidden_states [1, n, E] of the rows that were in the layer before -> of those that were in this one.

        Behind the last layer each row is in its place again; those that did not get there are zero.
        """
        its_pass: Any = told.get("kvcli_pass")
        forward: Any = self._forward()
        if not getattr(its_pass, "prunes", False):
            return forward(hidden_states, *args, **told)
        hidden = its_pass.narrow(self._layer, hidden_states[0]).unsqueeze(0)
        if (live := its_pass.live) is None:
            return forward(hidden, *args, **told)
        at = torch.tensor(live, device=hidden.device)
        cut = {name: _cut(told[name], dim, at) for name, dim in _CARRY.items() if name in told}
        out = forward(hidden, *args, **{**told, **cut})
        if not self._is_last:
            return out
        states = out[0] if isinstance(out, tuple) else out  # some models written for older releases
        whole = states.new_zeros(1, its_pass.n_rows, states.shape[2]).index_copy_(1, at, states)
        return (whole, *out[1:]) if isinstance(out, tuple) else whole


def install(layers: Iterable[Any]) -> None:
    """Put gates in front of these decoder layers, where there are none yet."""
    every = list(layers)
    for i, layer in enumerate(every):
        if not isinstance(layer.forward, Gate):
            layer.forward = Gate(i, layer.forward, is_last=i == len(every) - 1)


def narrowed(pruner: Pruner, layer: int, live: Live, hidden: Tensor) -> tuple[Sequence[int], Tensor]:
    """The live rows and their hidden states [n, E] -> those that go on, rising, and theirs."""
    rows = live.rows
    if (chosen := pruner.before(layer, live)) is not None and len(chosen) < len(rows):
        on = set(chosen)
        out = [row for row in rows if row not in on]
        pruner.left(layer, out, hidden[places(out, rows)])
        rows, hidden = sorted(on), hidden[places(sorted(on), rows)]
    if (back := pruner.revive(layer)) is not None:
        both = [*rows, *back[0]]
        assert len(set(both)) == len(both), "a row that comes back was away"
        order = sorted(range(len(both)), key=both.__getitem__)
        rows, hidden = [both[i] for i in order], torch.cat((hidden, back[1].to(hidden)))[order]
    assert rows, "at least one row goes on"
    return rows, hidden


def _cut(x: Any, dim: int, at: Tensor) -> Any:
    """What is told of all rows -> of those `at`."""
    if isinstance(x, Tensor):
        return x.index_select(dim, at.to(x.device))
    return tuple(_cut(each, dim, at) for each in x) if isinstance(x, tuple | list) else x
