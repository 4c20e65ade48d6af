"""Quantize the linear layers of a model and move the model to its devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kvcli.engine.hf.lm import ModelLayout
from kvcli.engine.loading import weights
from kvcli.engine.loading.device_split import split_layers_
from kvcli.engine.loading.host_weights import move_embeddings_
from kvcli.engine.resources import drop_pages
from kvcli.errors import BadModel
from kvcli.kernels import linear_quantized, triton_support
from kvcli.kernels.linear import NativeWeight
from kvcli.kernels.linear_quantized import Bits, PackedLinear, Swap, quantize_, quantize_experts_
from kvcli.kv.offload.transfer import bus_of
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
        blocks = "native blocks" if device.type == "cpu" else "fused blocks"
        description = blocks if method == convert.METHOD else getattr(method, "value", method)
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


ROWS = 8192  # of an output layer, quantized at a time: in float32 a large vocabulary takes gigabytes


def quantize_head_and_move_embeddings_(model: Any, head: str, embeddings: str, device: torch.device) -> str:
    """Quantize the output layer to 8 bits, and move the table of embeddings to host memory, as far as asked for. Return
    what was done, for the description of the backend."""
    said, layer = "", model.get_output_embeddings()
    if head != "none":
        weight = layer.weight.detach()
        if why := linear_quantized.why_not(tuple(weight.shape), 8) or _unserved(device, weight.dtype):
            raise BadModel(f"load.head = {head}: {why}", code="model_unsupported", try_=["--set load.head=none"])
        there = device if device.type != "cpu" else None
        rows = weight.rows if isinstance(weight, NativeWeight) else weight.__getitem__
        n = weight.shape[0]
        each = (torch.arange(a, min(a + ROWS, n), device=weight.device) for a in range(0, n, ROWS))
        parts = [linear_quantized.pack(rows(some).to(device), 8, native=False) for some in each]
        data, scale = (torch.cat([getattr(part, name) for part in parts]) for name in ("data", "scale"))
        whole = replace(parts[0], shape=(weight.shape[0], weight.shape[1]), data=data, scale=scale)
        fresh = PackedLinear(whole.native() if there is None else whole, layer.bias, weight.dtype)
        for module in model.modules():
            for name, child in module.named_children():
                if child is layer:
                    setattr(module, name, fresh)
        said = f", output layer in {head}"
        drop_pages(weight)
    if embeddings != "device":
        if head == "none" and layer.weight is model.get_input_embeddings().weight:
            why = "the output layer reads the same table in full"
            raise BadModel(f"load.embeddings = {embeddings}: {why}", code="no_split", try_=["--set load.head=int8"])
        move_embeddings_(model, bus_of(device))
        said += ", embeddings in host memory"
    return said


def _unserved(device: torch.device, dtype: torch.dtype) -> str:
    return triton_support.why_not(device, dtype) if device.type != "cpu" else ""


def _swap_notes(swap: Swap, quant: str) -> tuple[str, ...]:
    """Return one note per reason for layers that were not quantized."""
    notes = [f"{count} linear layers were not quantized: {why}" for why, count in swap.kept.items()]
    if not swap.packed:
        notes.append(f"load.quant = {quant} had no effect: no layer of the model can be quantized")
    return tuple(notes)
