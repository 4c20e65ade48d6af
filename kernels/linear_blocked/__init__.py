"""bf16 linear layers on a CPU, laid out or computed as that CPU does it fastest.

x [..., I] bf16 -> x W^T + b [..., O] bf16, accumulated in float32 as `F.linear` does. Where the CPU multiplies bf16,
the weight lies in the blocks that oneDNN's kernels want: a plain one is rearranged by the library in every call, which
costs most when there are few rows. On a 4096 x 4096 layer, one thread: 1 row 1.6x, 8 rows 1.5x, 512 rows 1.04x faster.
Where it does not (AVX2 alone), torch multiplies bf16 number by number, and several rows are faster in float32, a
stretch of the weight at a time: 4 rows 1.5x, 16 rows 4x, 512 rows 8x (docs/lab-log.md). Served: `nn.Linear` in bf16 on
a CPU; anything else stays as it is, and `why_not` says why.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kvcli.kernels.cpu_matmul import multiplies

LEAST = 4  # rows; oneDNN's kernels are slower below, so fewer rows are filled up; float32 pays from here on
STRETCH = 1 << 19  # weights in float32 at a time: 2 MiB, small enough to stay in cache


def why_not(weight: Tensor) -> str:
    """Why a weight [O, I] cannot be served; "" if it can."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return f"{weight.dtype} on {weight.device.type}: only bf16 on a CPU gains"
    return ""


def block(weight: Tensor) -> Tensor:
    """A weight [O, I] as `linear_blocked` wants it: in oneDNN's own layout, same bytes, or as it is."""
    if not multiplies(weight.dtype):
        return weight.detach()
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
    return blocked


def linear_blocked(x: Tensor, blocked: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I], a weight from `block`, bias [O] -> [..., O]."""
    rows = x.reshape(-1, x.shape[-1])
    y = _blocked(rows, blocked, bias) if blocked.is_mkldnn else _widened(rows, blocked, bias)
    return y.view(*x.shape[:-1], y.shape[-1])


def _blocked(rows: Tensor, blocked: Tensor, bias: Tensor | None) -> Tensor:
    n = rows.shape[0]
    if n == 1:
        rows = rows.expand(LEAST, -1)  # plain decoding; cheaper than zeros
    elif 0 < n < LEAST:
        rows = pad(rows, (0, 0, 0, LEAST - n))
    y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, blocked, bias, "none", [], "")
    return y[:n]


def _widened(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float32; for few rows it does not pay to write the weights out in twice the bytes."""
    if rows.shape[0] < LEAST:
        return linear(rows, weight, bias)
    y, wide = rows.new_empty(rows.shape[0], weight.shape[0]), rows.float()
    stretch = max(1, STRETCH // weight.shape[1])
    for a in range(0, weight.shape[0], stretch):
        of = None if bias is None else bias[a : a + stretch].float()
        y[:, a : a + stretch] = linear(wide, weight[a : a + stretch].float(), of)
    return y
