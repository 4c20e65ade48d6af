"""Quantize the linear layers of a model and move the model to its devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvcli.engine.hf.lm import ModelLayout
from kvcli.engine.loading import weights
from kvcli.engine.loading.device_split import split_layers_
from kvcli.engine.resources import drop_pages
from kvcli.errors import BadModel
from kvcli.kernels import linear_quantized
from kvcli.kernels.linear_quantized import Bits, Swap, quantize_, quantize_experts_
from kvcli.models.gguf import convert


def quantize_and_place(
    model: Any, layout: ModelLayout, quant: str, device: torch.device
) -> tuple[str, tuple[str, ...]]:
    """Quantize the model and move it to `device`. Return what runs its linear layers, and notes on layers that were not
    quantized."""
    if quant == "none":
        if model.device.type != device.type:
            model.to(device)
        given = getattr(model.config, "quantization_config", None)
        method = getattr(given, "quant_method", "quantized")
        description = "native blocks" if method == convert.METHOD else getattr(method, "value", method)
        return ("torch" if given is None else f"{description}, as in the checkpoint"), ()
    if (layers := layout.layers) is None:  # LongCat has two attention modules per layer
        why = "its attention modules are in no list of layers"
        raise BadModel(
            "its linear layers cannot be quantized", code="model_unsupported", lines=[why], try_=["--quant none"]
        )
    backend, swap = _packed(layers, quant, device)
    assert swap is not None
    model.to(device)
    return backend, _swap_notes(swap, quant)


def _packed(layers: nn.Module, quant: str, device: torch.device) -> tuple[str, Swap | None]:
    """Quantize the linear layers below `layers` for `device`. Return the backend that runs them, and the counts."""
    if quant == "none":
        return "torch", None
    if device.type == "cpu":
        by = "native" if linear_quantized.serves(next(layers.parameters()).dtype) else "torch"
        bits: Bits = 8 if quant == "int8" else 4
        swap = quantize_(layers, bits, drop_pages) + quantize_experts_(layers, bits, drop_pages)
        return f"{by} packed {quant}", swap
    swap, backend = weights.quantize_for_gpu(layers, quant, device)
    return backend, swap


def split(
    model: Any, layout: ModelLayout, quant: str, device: torch.device, on_gpu: int
) -> tuple[str, tuple[str, ...], list[torch.device]]:
    """Quantize the model, with the last layers on `device`. Return also the device of each layer."""
    layers = None if layout.recurrent_layers else layout.layers
    if layers is None:
        why = "some are recurrent" if layout.recurrent_layers else "its attention modules are in no list of layers"
        raise BadModel("layers of this model cannot be split over devices", code="no_split", lines=[why])
    n, notes = min(on_gpu, len(layers)), list[str]()
    backends = dict[str, None]()
    for part, where in ((layers[: len(layers) - n], model.device), (layers[len(layers) - n :], device)):
        if len(part):
            backend, swap = _packed(part, quant, where)
            backends[backend] = None
            notes += _swap_notes(swap, quant) if swap is not None else ()
    places = split_layers_(model, list(layers), n, device)
    description = f"{n} of {len(layers)} layers on {device}" if n < len(layers) else f"embeddings on {model.device}"
    return f"{' and '.join(backends)}, {description}", tuple(notes), places


def _swap_notes(swap: Swap, quant: str) -> tuple[str, ...]:
    """Return one note per reason for layers that were not quantized."""
    notes = [f"{count} linear layers were not quantized: {why}" for why, count in swap.kept.items()]
    if not swap.packed:
        notes.append(f"load.quant = {quant} had no effect: no layer of the model can be quantized")
    return tuple(notes)
