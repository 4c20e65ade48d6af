"""Layer gates, which replace decoder layers in transformers' own loop, so that a pass can start at any layer and end
after any. They are installed for the first such pass; complete passes run through them unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from kvcli.engine.hf.cache_shim import current, weak


class StopForward(Exception):
    """Raised to end a forward pass early, once all requested output is computed."""


class Gate:
    """A gate around one layer of a model."""

    def __init__(self, layer: int, forward: Callable[..., Any], *, is_last: bool) -> None:
        """`forward`: the layer's own forward."""
        self._layer, self._is_last = layer, is_last
        self._rest: tuple[Any, ...] | None = None  # further outputs of the layer; None = hidden states alone
        self._forward = weak(forward)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on hidden_states [1, N, E]; return them unchanged if the pass starts at a later layer."""
        its_pass = current()
        forward: Any = self._forward()
        if its_pass is None or (layers := its_pass.layers) is None:
            return forward(hidden_states, *args, **kwargs)
        if not layers.stop:  # no layer: return the input of the first one
            its_pass.hidden = hidden_states[0]
            raise StopForward
        is_passed = self._layer < layers.start
        if self._layer == layers.start - (is_passed and self._is_last) and its_pass.hidden is not None:
            hidden_states = its_pass.hidden.unsqueeze(0)
        if is_passed:  # its further outputs are known from a complete pass (layer_gate_check.py)
            return hidden_states if self._rest is None else (hidden_states, *self._rest)
        out = forward(hidden_states, *args, **kwargs)
        # some models written for older releases return tuples
        self._rest = out[1:] if isinstance(out, tuple) else None
        if self._layer == layers.stop - 1 and not self._is_last:
            its_pass.hidden = (out[0] if isinstance(out, tuple) else out)[0]
            raise StopForward
        return out


def install(layers: Iterable[Any]) -> None:
    """Install gates around these decoder layers, if they have none yet."""
    every = list(layers)
    for i, layer in enumerate(every):
        if not isinstance(layer.forward, Gate):
            layer.forward = Gate(i, layer.forward, is_last=i == len(every) - 1)
