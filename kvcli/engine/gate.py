"""Gates stand in the places of decoder layers in transformers' own loop, and let on the rows that a pruner names.

They are put up for the first pass that needs them; others go straight through. Rows that stay behind are no longer
computed, and rows further on do not see them: the same as a mask that hides them from there on (tests/test_gate.py).
A pass over some of the layers is let in at the first of them, and ends behind the last.
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
    from kvcli.engine.behind import Behind
    from kvcli.engine.feed import Asks, Fresh
    from kvcli.engine.lm import LM
    from kvcli.engine.policy import Guard
    from kvcli.engine.rows import Rows
    from kvcli.kv.slots import Store

_CARRY = {"position_embeddings": -2, "position_ids": -1}  # what a layer is told of each row, and in which dimension


class Enough(Exception):
    """Ends a pass early: all that was wanted of it is there."""


@dataclass(frozen=True, slots=True)
class Live:
    """What a pruner is shown before a layer."""

    rows: Sequence[int]  # of the feed, rising: those on their way
    fresh: Fresh | None  # what the layer before made; None before the first, and where that is stored already
    queries: Tensor | None  # [H, len(hear), D], of the heard rows there


# a layer, and what the one below made of tokens at these positions -> those of them that go on, and who comes back
Choose = Callable[[int, Live, Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class Pruner(Protocol):
    """Narrows the rows of one feed between layers (LazyLLM, arXiv 2407.14057). Rows are indices into the feed's.

    Before each layer it is asked `before`, told `left`, then asked `revive`. Rows that are wanted or heard must go
    through every layer, and a row may come back as soon as the first layer has been: so what was left behind by an
    earlier pass comes back as a row of this feed that is dropped at once, and revived where its hidden state belongs.
    A row older than what is stored takes a `past` that hides from it what is newer: stores show a row all they hold.
    A pass that broke among those of other texts is made again: with the first layer all begins anew. Of a prompt read
    layer by layer it is asked once all of it is through the layer before; before the first there are no hidden states.
    """

    def before(self, layer: int, live: Live) -> Sequence[int] | None:
        """Which live rows go on into this layer, at least one; None = all."""

    def left(self, layer: int, rows: Sequence[int], hidden: Tensor) -> None:
        """Rows that stay behind, and their hidden states [n, E]: what this layer would have been given."""

    def revive(self, layer: int) -> tuple[Sequence[int], Tensor] | None:
        """Rows that come back into this layer, none of them live, and their hidden states [n, E]."""


class Pruning(Protocol):
    """The `[prune]` table of a profile, shared by all texts."""

    @property
    def reads(self) -> str:
        """How much of a long prompt goes through all layers, in words; "" = all of it."""

    def about(self, lm: LM) -> str:
        """What it does to prompts of this model, in words; "" = nothing. Raises BadModel where it can judge none."""

    @property
    def hears(self) -> int:
        """Newest rows of what is read whose queries it judges by."""

    @property
    def every(self) -> int | None:
        """Tokens of an answer between two boundaries at which some may come back; None = what stays behind is gone."""

    @property
    def completes(self) -> bool:
        """Whether those that are still behind come back before the next prompt is read."""

    def behind(self, n: int) -> int:
        """Of n tokens, how many are kept as one hidden vector at most: what memory is planned with."""

    def takes(self, n: int, chunk: int) -> int:
        """How many of the n tokens that are left of a prompt it judges together."""

    @property
    def guard(self) -> Guard:
        """Tokens that go through every layer whatever it judges."""

    def over(self, lm: LM, past: Store, rows: Rows, must: set[int], part: int) -> Asks[Pruner | None] | Pruner | None:
        """For reading these rows behind what is stored, perhaps after a look at them; None = all of them go on.

        `must`: rows that go through every layer: what the guard covers, and those that are heard. `part`: rows of a
        pass at most.
        """

    def back(self, lm: LM, past: Store, behind: Behind) -> Choose:
        """Who comes back on a trip that the newest token makes for that alone (trip.py). Asked where `every` is set."""


class Gate:
    """One layer of a model, given the rows of a pass that go on into it."""

    def __init__(self, layer: int, forward: Callable[..., Any], *, is_last: bool) -> None:
        """`forward`: the layer's own, held weakly: a layer that held itself would outlive its model."""
        self._layer, self._is_last = layer, is_last
        self._rest: tuple[Any, ...] | None = None  # what the layer gives beside the rows; None = rows alone
        # what accelerate puts in its place is no method, and holds the layer anyway
        self._forward = WeakMethod(forward) if ismethod(forward) else lambda: forward

    def __call__(self, hidden_states: Tensor, *args: Any, **told: Any) -> Any:
        """hidden_states [1, n, E] of the rows that were in the layer before -> of those that were in this one.

        Behind the last layer each row is in its place again; those that did not get there are zero. A pass that begins
        further on goes by.
        """
        its_pass: Any = told.get("kvcli_pass")
        forward: Any = self._forward()
        if not getattr(its_pass, "is_gated", False):
            return forward(hidden_states, *args, **told)
        if self._layer < its_pass.layers.start:
            return self._given(hidden_states)
        if self._layer == its_pass.layers.start and its_pass.hidden is not None:
            hidden_states = its_pass.hidden.unsqueeze(0)
        hidden, live = its_pass.narrow(self._layer, hidden_states[0]), its_pass.live
        cut = told if live is None else {**told, **_of(told, torch.tensor(live, device=hidden.device))}
        out = forward(hidden.unsqueeze(0), *args, **cut)
        # tuples come from some models written for older releases
        self._rest = out[1:] if isinstance(out, tuple) else None
        whole = (out[0] if isinstance(out, tuple) else out)[0]
        if self._is_last and live is not None:
            at = torch.tensor(live, device=whole.device)
            whole = whole.new_zeros(its_pass.n_rows, whole.shape[1]).index_copy_(0, at, whole)
        if self._layer == its_pass.layers.stop - 1 and not self._is_last:
            its_pass.hidden = whole
            raise Enough
        return self._given(whole.unsqueeze(0))

    def _given(self, hidden_states: Tensor) -> Any:
        """As the layer gives it, which the first pass through all of them has shown (seam.compare_narrowed)."""
        return hidden_states if self._rest is None else (hidden_states, *self._rest)


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


def _of(told: dict[str, Any], at: Tensor) -> dict[str, Any]:
    """What a layer is told of some rows alone."""
    return {name: _cut(told[name], dim, at) for name, dim in _CARRY.items() if name in told}


def _cut(x: Any, dim: int, at: Tensor) -> Any:
    """What is told of all rows -> of those `at`."""
    if isinstance(x, Tensor):
        return x.index_select(dim, at.to(x.device))
    return tuple(_cut(each, dim, at) for each in x) if isinstance(x, tuple | list) else x
