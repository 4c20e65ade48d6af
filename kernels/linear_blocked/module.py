"""`nn.Linear` with a weight arranged for this CPU, and the replacement in a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kvcli.kernels.cpu_matmul import multiplies
from kvcli.kernels.linear_blocked import block, linear_blocked, why_not


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
