"""The native RMSNorm in the place of a model's own, wherever both give the same bits on trial rows."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from kvcli.kernels.rms_norm import FORMS, Norm, norm_of, rms_norm, why_not
from kvcli.kernels.trial import tried


class NativeNorm:
    """The forward of one norm. Holds its weight and no module: a module that held itself would outlive its model."""

    def __init__(self, weight: Tensor, norm: Norm, own: Callable[[Tensor], Tensor]) -> None:
        """`own`: the module's forward, for rows of another type than its weight's."""
        self.weight, self.norm, self._own = weight, norm, WeakMethod(own)
        self.kind = (norm.form, norm.eps, weight.shape, weight.dtype)

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == self.weight.dtype:
            return rms_norm(hidden, self.norm)
        own = self._own()
        assert own is not None
        return own(hidden)


@torch.no_grad()
def norm_(root: nn.Module) -> int:
    """Have all norms below `root` computed natively that are found to be RMSNorm. Returns how many."""
    done = 0
    for module in root.modules():
        weight = module._parameters.get("weight")
        epsilons = [v for k, v in vars(module).items() if "eps" in k and isinstance(v, float)]
        if weight is None or weight.dim() != 1 or len(epsilons) != 1 or why_not(weight):
            continue
        if len(list(module.parameters())) > 1 or list(module.children()) or "forward" in vars(module):
            continue
        x = trial_rows(weight)
        theirs = tried(module, x)
        for form in FORMS:
            norm = norm_of(weight, epsilons[0], form)
            if theirs is not None and torch.equal(rms_norm(x, norm), theirs):
                module.forward = NativeNorm(weight.detach(), norm, module.forward)
                done += 1
                break
    return done


def trial_rows(weight: Tensor) -> Tensor:
    """[35, H] of all sizes, with channels that stand out."""
    noise = torch.Generator().manual_seed(weight.shape[0])
    x = torch.randn(5, 7, weight.shape[0], generator=noise)
    x[:, 3:, ::37] *= 60
    return (x * torch.tensor([1e-6, 1e-3, 0.3, 20.0, 1e4]).view(5, 1, 1)).flatten(0, 1).to(weight.dtype)
