"""A reduced model that runs only a few layers of each kind, because layers that differ only in their weights need one
test.

The tests (whether a fused layer computes the same, whether a row is batch invariant) depend on code, shapes and
settings. The first and last layer of each kind run, as models differ there if anywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from kvcli.kernels.module_probe import first_and_last, group_by_kind, kind

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM


def kinds(lm: LM, layers: Sequence[nn.Module]) -> list[list[int]]:
    """Group the layers of a model by kind: module types, attention parameters, stored shapes, and per-layer config
    entries."""
    config = vars(lm.model.config.get_text_config()).values()
    listed = [of for of in config if isinstance(of, list | tuple) and len(of) == len(layers)]

    def kind_of(i: int) -> Hashable:
        return (
            kind(layers[i]),
            lm.attention_params[i],
            lm.shapes[i],
            lm.sinks[i] is None,
            *(str(of[i]) for of in listed),
        )

    return group_by_kind(range(len(layers)), kind_of)


@contextmanager
def reduced_model(lm: LM, layers: Sequence[nn.Module]) -> Iterator[list[int]]:
    """Within the block, only the first and last layer of each kind run. The layers between pass on their input.

    Yields the indices of the layers that run.
    """
    tried = {i for group in kinds(lm, layers) for i in first_and_last(group)}
    tried |= {shape.shared_from for shape in lm.shapes if shape.shared_from is not None}
    # a fused layer's forward is also called directly
    ways: list[Any] = [vars(layer).get("forward") for layer in layers]
    # forwards replaced by others
    tried |= {i for i, way in enumerate(ways) if way is not None and not hasattr(way, "run")}
    fused = [way for i, way in enumerate(ways) if i not in tried and way is not None]
    plain = [layer for i, layer in enumerate(layers) if i not in tried and ways[i] is None]
    rest: tuple[Any, ...] | None = None  # further outputs of a layer; None = hidden states alone

    def note(layer: nn.Module, args: object, gave: Any) -> None:
        nonlocal rest
        rest = gave[1:] if isinstance(gave, tuple) else None

    def hand_on(hidden_states: Tensor, *args: object, **told: object) -> Any:
        return hidden_states if rest is None else (hidden_states, *rest)

    def run(x: Tensor, *args: object) -> Tensor:
        return x

    hook = layers[0].register_forward_hook(note) if plain else None
    for way in fused:
        way.run = run
    for layer in plain:
        layer.forward = hand_on
    try:
        yield sorted(tried)
    finally:
        if hook is not None:
            hook.remove()
        for way in fused:
            del way.run
        for layer in plain:
            del layer.forward
