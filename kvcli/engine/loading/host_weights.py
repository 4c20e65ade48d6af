"""Weights in pinned host memory that are tensors of a GPU: kernels read them across the bus, in captured passes too.

The driver gives registered host memory an address that a GPU reads. A table of embeddings is best kept there, because a
pass reads one row for each token of it: 8 KiB of a gigabyte.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.engine.resources import drop_pages
from kvcli.errors import BadModel
from kvcli.kernels.linear import plain
from kvcli.kernels.linear_quantized import codes_of, quantize_experts_
from kvcli.kernels.moe_linear import weights_of
from kvcli.kernels.moe_linear.tensor import Experts
from kvcli.kv.offload.transfer import DeviceLink


def in_host_memory(t: Tensor, bus: DeviceLink) -> Tensor:
    """Return a tensor of the link's device with the numbers of t, in host memory. Raises BadModel if it cannot be
    pinned."""
    memory = mmap.mmap(-1, -(-t.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    if why := bus.pin(whole):
        raise BadModel(
            f"{t.nbytes >> 20:,} MiB of weights cannot be read in host memory: {why}",
            code="not_pinned",
            try_=["--set load.embeddings=device", "--set load.experts_on_gpu=auto", "--device cpu"],
        )
    weakref.finalize(whole.untyped_storage(), bus.unpin, whole.data_ptr(), memory).atexit = False
    whole[: t.nbytes].view(t.dtype).view(t.shape).copy_(t)
    there = whole
    if bus.device.type == "cuda":  # torch takes registered memory for a GPU's own, and keeps what describes it
        about = {"data": (whole.data_ptr(), False), "shape": tuple(whole.shape), "typestr": "|u1", "version": 2}
        described = SimpleNamespace(__cuda_array_interface__=about, keeps=whole)
        there = torch.as_tensor(described, device=bus.device)
    return there[: t.nbytes].view(t.dtype).view(t.shape)


def move_embeddings_(model: Any, bus: DeviceLink) -> None:
    """Move the table of token embeddings to host memory that the link's device reads. No other module may share it."""
    table = model.get_input_embeddings()
    old = table.weight
    table.weight = nn.Parameter(in_host_memory(plain(old.detach()), bus), requires_grad=False)
    drop_pages(old)


def move_experts_(layers: Iterable[nn.Module], quant: str, bus: DeviceLink) -> None:
    """Move the experts of these layers to host memory that the link's device reads, quantized as `load.quant` says."""
    for layer in layers:
        if quant in ("int8", "int4"):
            quantize_experts_(layer, 8 if quant == "int8" else 4, drop_pages, torch.device("cpu"))
        for module in layer.modules():
            plain = [(name, old) for name, old, turned in weights_of(module) if isinstance(turned, bool)]
            found: dict[str, Tensor] = {name: in_host_memory(old.detach(), bus) for name, old in plain}
            for name, old, codes in codes_of(module):
                there = codes.over(in_host_memory(codes.memory, bus))
                found[name] = Experts(there, old.shape, old.dtype, old.is_turned)
            for name, fresh in found.items():
                drop_pages(getattr(module, name))
                setattr(module, name, nn.Parameter(fresh, requires_grad=False))
