"""Limit the size of a model to that of its weight files, whatever its config says."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from kvcli.errors import BadModel

if TYPE_CHECKING:
    from kvcli.models.source import Source

_SLACK = 1 << 24  # numbers allowed for masks and tables that are not in the files
_MODULES = 64  # modules allowed per tensor of the files; a layer has about as many modules as tensors


@contextmanager
def limit_to_files(source: Source) -> Iterator[None]:
    """Stop building a model in this block once it has more numbers or modules than the files can fill; raises BadModel.

    transformers builds a model on the meta device, where a size costs nothing and a layer costs milliseconds, and only
    then reads files. So a config with a billion layers fails after as many modules as the files have tensors.
    """
    budget = _BuildCounter(source)
    hooks = [
        register_module_parameter_registration_hook(budget.add_numbers),
        register_module_buffer_registration_hook(budget.add_numbers),
        register_module_module_registration_hook(budget.add_module),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _BuildCounter:
    """Counter of registered tensors that still exist: an attribute that is set twice counts once."""

    def __init__(self, source: Source) -> None:
        stored = source.parameters
        # pickles do not state it; a quantized number has at least one bit
        if not stored or "quantization_config" in source.config:
            stored = 8 * source.nbytes
        # an output layer is built before it is tied to the embeddings: at most the size of all stored weights
        self.numbers, self.name = 2 * stored + _SLACK, source.id
        self.modules = _MODULES * (sum(len(f.tensors) for f in source.files) or source.nbytes)
        self._held: dict[int, weakref.ref[Tensor]] = {}
        self._most, self._seen = 0, 0  # upper bound of the existing numbers; number of modules

    def add_numbers(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            return
        self._held[id(tensor)] = weakref.ref(tensor)
        self._most += tensor.numel()
        if self._most <= self.numbers:
            return
        gc.collect()
        held = [t for ref in self._held.values() if (t := ref()) is not None]
        self._held = {id(t): weakref.ref(t) for t in held}
        self._most = sum(t.numel() for t in held)
        if self._most > self.numbers:
            self._refuse()

    def add_module(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        self._seen += 1
        if self._seen > self.modules:
            self._refuse()

    def _refuse(self) -> None:
        raise BadModel(
            f"the weights of {self.name} are incomplete: config.json describes a larger model",
            code="model_incomplete",
            lines=["config.json describes more weights than its files hold"],
            try_=["check that config.json belongs to these weights", "download the model again"],
        )
