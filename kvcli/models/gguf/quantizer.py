"""Quantizer for transformers: linear layers stay quantized while transformers loads them, by its quantizer interface.

A checkpoint that says `quant_method: kvcli` has, for each module it names, `data` and `scale` of
`kvcli.kernels.linear_quantized` in place of `weight`: 4 bits, low nibble first.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kvcli.kernels.linear_quantized import QuantizedWeight, why_not
from kvcli.kernels.linear_quantized.module import PackedLinear

if TYPE_CHECKING:
    from torch import nn

METHOD, GROUP = "kvcli", 32


@cache
def register() -> None:
    """Register the quantizer, once in a process."""
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class GGUFConfig(QuantizationConfigMixin):  # type: ignore[misc]  # Any to mypy, as all of transformers
        def __init__(self, modules: list[str] | None = None, **other: Any) -> None:
            self.quant_method, self.modules = METHOD, modules or []

    @register_quantizer(METHOD)
    class Quantizer(HfQuantizer):  # type: ignore[misc]  # the same
        is_trainable = False

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return False

        def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
            dtype = next(model.parameters()).dtype
            for name in self.quantization_config.modules:
                _swap(model, name, dtype)


def _swap(model: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Replace a linear layer by an empty quantized layer."""
    layer = model.get_submodule(name)
    if type(layer) is not torch.nn.Linear:
        raise TypeError(f"{name} is quantized in the file, but is no linear layer")
    n, k = shape = (layer.out_features, layer.in_features)
    if why := why_not(shape, 4):
        raise ValueError(f"{name} cannot be quantized: {why}")
    data = torch.empty(n, k // 2, dtype=torch.uint8, device="meta")
    scale = torch.empty(k // GROUP, n, 2, dtype=dtype, device="meta")
    parent, _, last = name.rpartition(".")
    packed = PackedLinear(QuantizedWeight(4, GROUP, shape, data, scale, is_native=False), layer.bias)
    setattr(model.get_submodule(parent), last, packed)
