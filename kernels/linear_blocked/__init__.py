"""bf16 linear layers in the layout or computation that is fastest on this CPU.

x [..., I] bf16 -> x W^T + b [..., O] bf16, accumulated in float32 as `F.linear` does. If the CPU multiplies bf16, the
weight is stored in the blocks of oneDNN's kernels. The library would rearrange a plain weight in every call, which
costs most for few rows. On a 4096 x 4096 layer, one thread: 1 row 1.6x, 8 rows 1.5x, 512 rows 1.04x faster. If the
CPU does not multiply bf16 (AVX2 alone), torch multiplies bf16 number by number. Several rows are then faster in
float32, a part of the weight at a time: 4 rows 1.5x, 16 rows 4x, 512 rows 8x (docs/measurements/lab-log.md).
Supported: `nn.Linear` in bf16 on a CPU; `why_not` gives the reason for others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from kvcli.kernels.invariant_activations import multiplies

LEAST = 4  # rows; oneDNN's kernels are slower below, so fewer rows are padded; float32 is faster from here on
STRETCH = 1 << 19  # weights in float32 at a time: 2 MiB, small enough to stay in cache


def why_not(weight: Tensor) -> str:
    """Return why a weight [O, I] is not supported; "" if it is."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return f"{weight.dtype} on {weight.device.type}: only bf16 on a CPU gains"
    return ""


def block(weight: Tensor) -> Tensor:
    """Arrange a weight [O, I] for `linear_blocked`: oneDNN's layout of the same size, or unchanged."""
    if not multiplies(weight.dtype):
        return weight.detach()
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
    return blocked


def linear_blocked(x: Tensor, blocked: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x [..., I] times a weight from `block`, plus bias [O] -> [..., O]."""
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
    """Compute in float32. For few rows it is slower, because the converted weights have twice the bytes."""
    if rows.shape[0] < LEAST:
        return linear(rows, weight, bias)
    y, wide = rows.new_empty(rows.shape[0], weight.shape[0]), rows.float()
    stretch = max(1, STRETCH // weight.shape[1])
    for a in range(0, weight.shape[0], stretch):
        of = None if bias is None else bias[a : a + stretch].float()
        y[:, a : a + stretch] = linear(wide, weight[a : a + stretch].float(), of)
    return y


# `nn.Linear` with a weight arranged for this CPU, and the replacement in a model.


class BlockedLinear(nn.Module):
    """Replacement of one `nn.Linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes
        self.blocked = block(weight)  # not a buffer, because no other code could read this layout
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear_blocked(x, self.blocked, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"


@torch.no_grad()
def block_(root: nn.Module, done_with: Callable[[Tensor], object] = lambda _: None) -> int:
    """Replace each `nn.Linear` below `root` that gets faster, one at a time, so that at most one weight exists twice.

    A weight that another module shares (a tied head) is not replaced if its new layout would need a second copy.
    `done_with` gets each old weight, which is not read here again. Returns the number replaced.
    """
    owners: dict[int, int] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    done = 0
    # a list of all modules would keep every replaced layer alive until the end
    for parent in [module for module in root.modules() if type(module) is not nn.Linear]:
        for name, layer in list(parent.named_children()):
            if type(layer) is not nn.Linear or why_not(layer.weight):
                continue
            is_laid_out = multiplies(layer.weight.dtype)
            if is_laid_out and owners[id(layer.weight)] > 1:
                continue
            setattr(parent, name, BlockedLinear(layer.weight, layer.bias))
            if is_laid_out:
                done_with(layer.weight)
            del layer
            done += 1
    return done
