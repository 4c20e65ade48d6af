"""Weights in pinned host memory that are tensors of a GPU: kernels read them across the bus, in captured passes too.

The driver gives registered host memory an address that a GPU reads. A table of embeddings is best kept there, because a
pass reads one row for each token of it: 8 KiB of a gigabyte.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from kvcli.engine.resources import drop_pages
from kvcli.errors import BadModel
from kvcli.kv.offload.transfer import DeviceLink


class _CudaArray:
    """Bytes of host memory as CUDA's array interface describes them. torch takes registered ones for a GPU's own."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole  # which the tensor over it keeps alive
        data, shape = (whole.data_ptr(), False), tuple(whole.shape)
        self.__cuda_array_interface__: dict[str, Any] = {"data": data, "shape": shape, "typestr": "|u1", "version": 2}


def in_host_memory(t: Tensor, bus: DeviceLink) -> Tensor:
    """Return a tensor of the link's device with the numbers of t, in host memory. Raises BadModel if it cannot be
    pinned."""
    memory = mmap.mmap(-1, -(-t.nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    if why := bus.pin(whole):
        raise BadModel(
            f"{t.nbytes >> 20:,} MiB of weights cannot be read in host memory: {why}",
            code="not_pinned",
            try_=["--set load.embeddings=device --set load.experts=device", "--device cpu"],
        )
    weakref.finalize(whole.untyped_storage(), bus.unpin, whole.data_ptr(), memory).atexit = False
    whole[: t.nbytes].view(t.dtype).view(t.shape).copy_(t)
    there = torch.as_tensor(_CudaArray(whole), device=bus.device) if bus.device.type == "cuda" else whole
    return there[: t.nbytes].view(t.dtype).view(t.shape)


def move_embeddings_(model: Any, bus: DeviceLink) -> None:
    """Move the table of token embeddings to host memory that the link's device reads. No other module may share it."""
    table = model.get_input_embeddings()
    old = table.weight
    table.weight = nn.Parameter(in_host_memory(old.detach(), bus), requires_grad=False)
    drop_pages(old)
