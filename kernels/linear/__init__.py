"""Batch-invariant linear layers in bf16 and fp32 on a CPU.

x [..., K] -> x W^T + b [..., N], accumulated in float32 and rounded once. An output is one chain of fused products over
k, independent of other rows and outputs: a row alone, in a draft, or in a prompt of thousands gives the same bits. The
weight is stored in panels of 64 outputs, [ceil(N / 64), S, 64] words of 32 bits: one fp32, or two bf16. `why_not`
returns the reason why a weight is not supported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels.linear.weight_arena import WeightArena

PANEL = 64
SERVED = (torch.bfloat16, torch.float32)


def why_not(weight: Tensor) -> str:
    """Return why a weight [N, K] is not supported; "" if it is."""
    if built.native() is None:
        return built.why_not()
    if weight.device.type != "cpu" or weight.dtype not in SERVED:
        return f"{weight.dtype} on {weight.device.type}: only bf16 and float32 on a CPU"
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2:
        return f"{weight.shape[1]} inputs are not a multiple of 2"
    return ""


def pack(weight: Tensor, room: WeightArena | None = None) -> Tensor:
    """Arrange a weight [N, K] for `linear`: [ceil(N / 64), S, 64] words of 32 bits, as int32; in `room` if given."""
    words = weight.detach().contiguous().view(torch.int32)  # [N, S]
    n, s = words.shape
    shape = -(-n // PANEL), s, PANEL
    packed = words.new_empty(shape) if room is None else room.empty(shape)
    packed[-1].zero_()
    # one by one, because torch transposes a whole matrix in blocks
    for panel, rows in zip(packed, words.split(PANEL), strict=True):
        panel[:, : len(rows)].copy_(rows.T)
    return packed


def unpack(packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] of a packed weight."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:n].contiguous().view(dtype)


def rows_of(packed: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows `index` [...] of the packed weight, [..., K]: the lookup of an embedding with the same weight."""
    return packed[index // PANEL, :, index % PANEL].view(dtype)


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, n: int, *, level: str | None = None) -> Tensor:
    """Compute x [..., K] times a weight from `pack` with `n` outputs, plus bias [N] -> [..., N]; all of one dtype.

    `level`: a lesser kind of CPU than the best available.
    """
    functions = built.native(level)
    assert functions is not None
    if x.dtype not in SERVED or x.shape[-1] * x.itemsize != packed.shape[1] * 4:
        raise ValueError(f"{x.shape[-1]} inputs in {x.dtype} for a weight of {packed.shape[1] * 4} bytes a row")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (n,)):
        raise ValueError(f"a bias of {tuple(bias.shape)} {bias.dtype} for {n} outputs in {x.dtype}")
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], n))
    functions.linear(
        x.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        y.numel() // n,
        n,
        packed.shape[1],
        x.dtype == torch.float32,
    )
    return y
