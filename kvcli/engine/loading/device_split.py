"""Layers on two devices: the last ones and the output layer on a GPU, the first ones and the embeddings on the CPU.

A pass moves to the GPU once and the CPU does not wait, because tokens are sampled where the logits are. The move is
done in one place, before the layers on the GPU; all other code follows the device of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from kvcli.engine.hf.cache_shim import RunningPass, current, weak


class DeviceTransfer:
    """A transfer of a pass's arguments to a device, each once; shared by all layers there."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.count = device, 0  # number of transferred passes
        self._pass: Callable[[], object] = lambda: None
        # by id: the original, kept so that its id stays unique, and its copy
        self._brought: dict[int, tuple[Tensor, Tensor]] = {}

    def bring(self, args: Any, its_pass: RunningPass | None) -> Any:
        """Return the arguments with their tensors on the device. Without a pass they are copied each time."""
        if its_pass is None:
            return tree_map(lambda value: self._moved(value, {}), args)
        if self._pass() is not its_pass:
            self._pass, self._brought = ref(its_pass), {}
            self.count += 1
        return tree_map(lambda value: self._moved(value, self._brought), args)

    def _moved(self, value: Any, brought: dict[int, tuple[Tensor, Tensor]]) -> Any:
        if not isinstance(value, Tensor) or value.device == self.device:
            return value
        if id(value) not in brought:
            brought[id(value)] = value, value.to(self.device, non_blocking=True)
        return brought[id(value)][1]


class LayerAfterTransfer:
    """The forward of a layer on the GPU, with the transfer of its arguments."""

    def __init__(self, forward: Callable[..., Any], crossing: DeviceTransfer) -> None:
        """`forward`: the layer's own forward."""
        self._forward = weak(forward)
        self.crossing = crossing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with tensors from any device."""
        args, kwargs = self.crossing.bring((args, kwargs), current())
        forward: Any = self._forward()
        return forward(*args, **kwargs)


def split_layers_(model: Any, layers: Sequence[nn.Module], on_gpu: int, device: torch.device) -> list[torch.device]:
    """Move the last `on_gpu` layers and all later modules to `device`. Return the device of each layer.

    Embeddings and modules without weights remain: tables of positions are small and computed once per pass. An output
    layer that shares its weight with the embeddings gets a copy.
    """
    first = max(0, len(layers) - on_gpu)
    crossing, above = DeviceTransfer(device), layers[first:]
    inside = {id(part) for layer in layers for part in layer.modules()}
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embeddings.weight:
        head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
    behind = [part for layer in above for part in layer.modules()]
    for part in model.modules():
        has_weights = next(part.parameters(recurse=False), None) is not None
        if id(part) not in inside and has_weights and not isinstance(part, nn.Embedding):
            behind.append(part)
    for part in behind:
        part._apply(lambda t: t.to(device), recurse=False)  # type: ignore[no-untyped-call]
    for layer in above:
        layer.forward = LayerAfterTransfer(layer.forward, crossing)
    return [embeddings.weight.device] * first + [device] * len(above)
