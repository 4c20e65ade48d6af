"""Gates stand in the places of decoder layers in transformers' own loop: a pass over some of them is let in at the
first and ends behind the last. They are put up for the first such pass; others go straight through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import ismethod
from typing import Any
from weakref import WeakMethod

from torch import Tensor

from kvcli.engine.hf.cache_shim import current


class StopForward(Exception):
    """Ends a pass early: all that was wanted of it is there."""


class Gate:
    """One layer of a model."""

    def __init__(self, layer: int, forward: Callable[..., Any], *, is_last: bool) -> None:
        """`forward`: the layer's own, held weakly: a layer that held itself would outlive its model."""
        self._layer, self._is_last = layer, is_last
        self._rest: tuple[Any, ...] | None = None  # what the layer gives beside the rows; None = rows alone
        # what accelerate puts in its place is no method, and holds the layer anyway
        self._forward = WeakMethod(forward) if ismethod(forward) else lambda: forward

    def __call__(self, hidden_states: Tensor, *args: Any, **told: Any) -> Any:
        """hidden_states [1, N, E] -> as the layer gives it; of a pass that begins further on what came."""
        its_pass = current()
        forward: Any = self._forward()
        layers: range | None = getattr(its_pass, "layers", None)
        if layers is None:
            return forward(hidden_states, *args, **told)
        if not layers.stop:  # through none: what goes into the first is wanted
            its_pass.hidden = hidden_states[0]
            raise StopForward
        is_passed = self._layer < layers.start
        if self._layer == layers.start - (is_passed and self._is_last) and its_pass.hidden is not None:
            hidden_states = its_pass.hidden.unsqueeze(0)
        if is_passed:  # what else it gives a pass from the first layer on has shown (layer_gate_check.py)
            return hidden_states if self._rest is None else (hidden_states, *self._rest)
        out = forward(hidden_states, *args, **told)
        # tuples come from some models written for older releases
        self._rest = out[1:] if isinstance(out, tuple) else None
        if self._layer == layers.stop - 1 and not self._is_last:
            its_pass.hidden = (out[0] if isinstance(out, tuple) else out)[0]
            raise StopForward
        return out


def install(layers: Iterable[Any]) -> None:
    """Put gates in front of these decoder layers, where there are none yet."""
    every = list(layers)
    for i, layer in enumerate(every):
        if not isinstance(layer.forward, Gate):
            layer.forward = Gate(i, layer.forward, is_last=i == len(every) - 1)
