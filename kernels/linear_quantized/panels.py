"""Quantized linear layers by the native kernel: weights in its panels, one kernel for any number of rows.

Each output is one chain over its row's inputs, as in `kvcli.kernels.linear`, so it is batch invariant. With bf16 on a
CPU with byte products, a row becomes two integer digits for each group. All else is multiplied in float32
(kernels/native/c/linear_quantized.c).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.kernels import native as built

PANEL = 64


def serves(dtype: torch.dtype) -> bool:
    """True if inputs and scales of this dtype are supported."""
    return built.native() is not None and dtype in (torch.bfloat16, torch.float32)


def arrange(q: Tensor, bits: int) -> Tensor:
    """Arrange codes [N, K], int8 or 0..15 -> [ceil(N / 64), K * bits / 32, 64, 4] bytes; outputs beyond N are zeros."""
    n, k = q.shape
    codes = q.new_zeros(-(-n // PANEL) * PANEL, k)
    codes[:n] = q
    words = codes.view(torch.uint8).view(-1, PANEL, k * bits // 32, 32 // bits)  # 32 bits of codes
    four = words.bitwise_xor_(128) if bits == 8 else words[..., :4] | words[..., 4:] << 4
    return four.transpose(1, 2).contiguous()


def linear(
    x: Tensor, n: int, bits: int, group: int, data: Tensor, scale: Tensor, *, level: str | None = None
) -> Tensor:
    """Compute x [M, K] times a weight of `n` outputs -> [M, N]. `level`: a lesser kind of CPU than the best here."""
    functions = built.native(level)
    assert functions is not None
    x = x.contiguous()
    y = x.new_empty(x.shape[0], n)
    functions.linear_quantized(
        x.data_ptr(),
        data.data_ptr(),
        scale.data_ptr(),
        y.data_ptr(),
        x.shape[0],
        n,
        x.shape[1],
        bits,
        group,
        x.dtype == torch.float32,
    )
    return y
