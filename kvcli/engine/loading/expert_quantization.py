"""Quantization of expert weights while transformers loads them, through its official quantizer interface.

Checkpoints store experts one by one or in one tensor; transformers builds that tensor layer by layer. If it is
quantized at once, only one such tensor is in memory in full precision. If it is quantized after loading, all are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvcli.engine.process_memory import drop_pages
from kvcli.kernels import triton_support
from kvcli.kernels.linear_quantized import Bits
from kvcli.kernels.linear_quantized.experts import packed
from kvcli.kernels.moe_linear import weights_of

METHOD = "kvcli_experts"


def while_loading(quant: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the quantization_config for `from_pretrained`; None if experts are not quantized."""
    if quant not in ("int8", "int4") or (device.type != "cpu" and triton_support.why_not(device, dtype)):
        return None
    return _register()(bits=8 if quant == "int8" else 4, native=device.type == "cpu")


@cache
def _register() -> Any:
    """Register the quantizer, once per process."""

    @register_quantization_config(METHOD)
    class ExpertConfig(QuantizationConfigMixin):  # type: ignore[misc]  # Any to mypy, as all of transformers
        def __init__(self, bits: Bits = 8, native: bool = True) -> None:
            """`native`: in the layout of the CPU kernel; otherwise in the order of files, for any device."""
            self.quant_method, self.bits, self.native = METHOD, bits, native

    @register_quantizer(METHOD)
    class Quantizer(HfQuantizer):  # type: ignore[misc]  # the same
        is_trainable = False

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return False

        def param_needs_quantization(self, model: nn.Module, param_name: str, **other: Any) -> bool:
            path, _, name = param_name.rpartition(".")
            return any(
                name == one and isinstance(turned, bool) for one, _, turned in weights_of(model.get_submodule(path))
            )

        def get_quantize_ops(self) -> Any:
            return QuantizeExperts(self.quantization_config.bits, self.quantization_config.native)

        def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
            self.remove_quantization_config(model)
            return model

    return ExpertConfig


class QuantizeExperts(ConversionOps):  # type: ignore[misc]  # the same
    """The last step of loading one parameter."""

    def __init__(self, bits: Bits, native: bool) -> None:
        self.bits, self.native = bits, native

    def convert(self, found: dict[str, Any], *, model: nn.Module, **_: Any) -> dict[str, Any]:
        """Return parameters by name, quantized if possible."""
        return {name: self._packed(name, given, model) for name, given in found.items()}

    def _packed(self, full: str, given: Any, model: nn.Module) -> Any:
        weight = given[0] if isinstance(given, list) else given
        path, _, name = full.rpartition(".")
        turned = next((turned for one, _, turned in weights_of(model.get_submodule(path)) if one == name), "")
        made = turned if isinstance(turned, str) else packed(weight, turned, self.bits, native=self.native)
        if isinstance(made, str):
            return given
        drop_pages(weight)
        return nn.Parameter(made, requires_grad=False)
