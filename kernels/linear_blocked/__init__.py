"""bf16 linear layers on CPU whose weights lie in the blocks that oneDNN's kernels want.

x [..., I] bf16 -> x W^T + b [..., O] bf16, accumulated in float32 as `F.linear` does. A plain weight is rearranged by
the library in every call, which costs most when there are few rows; here it is rearranged once. On a 4096 x 4096
layer, one thread: 1 row 1.6x, 8 rows 1.5x, 512 rows 1.04x faster (docs/lab-log.md). Served: `nn.Linear` in bf16 on a
CPU with bf16 instructions; anything else stays as it is, and `why_not` says why.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 4  # rows; the kernels are slower below, so fewer rows are filled up


def why_not(weight: Tensor) -> str:
    """Why a weight [O, I] cannot be blocked; "" if it can."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return f"{weight.dtype} on {weight.device.type}: only bf16 on a CPU gains"
    if not (hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return "this torch or CPU has no bf16 kernels of oneDNN"
    return ""


def block(weight: Tensor) -> Tensor:
    """A weight [O, I] in oneDNN's own layout; same bytes, only `linear_blocked` can read it."""
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
    return blocked


def linear_blocked(x: Tensor, blocked: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I], a weight from `block`, bias [O] -> [..., O]."""
    rows = x.reshape(-1, x.shape[-1])
    n = rows.shape[0]
    if n == 1:
        rows = rows.expand(LEAST, -1)  # plain decoding; cheaper than zeros
    elif 0 < n < LEAST:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, LEAST - n))
    y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, blocked, bias, "none", [], "")
    return y[:n].view(*x.shape[:-1], y.shape[-1])
