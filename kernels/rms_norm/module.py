"""Replace a model's RMSNorm by a native or fused one, if both agree on probe rows.

The native norm must give the bits of PyTorch. On a GPU PyTorch's order of summation depends on the number of rows, so
there a few numbers may be rounded differently; with another form a tenth of them would be.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from kvcli.kernels import triton_support
from kvcli.kernels.module_probe import probe_output
from kvcli.kernels.rms_norm import FORMS, Norm, norm_of, rms_norm, why_not


class NativeNorm:
    """Forward of one norm. It references its weight but no module, because a reference would keep the model alive."""

    def __init__(self, weight: Tensor, norm: Norm, own: Callable[[Tensor], Tensor]) -> None:
        """Set up the norm. `own`: the module's forward, for rows of another dtype than its weight's."""
        self.weight, self.norm, self._own = weight, norm, WeakMethod(own)
        self.kind = (norm.form, norm.eps, weight.shape, weight.dtype)

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == self.weight.dtype:
            return rms_norm(hidden, self.norm)
        own = self._own()
        assert own is not None
        return own(hidden)


class FusedNorm:
    """Forward of one norm on a GPU."""

    def __init__(self, weight: Tensor, eps: float, form: str, own: Callable[[Tensor], Tensor]) -> None:
        self.weight, self._eps, self._form, self._own = weight, eps, form, WeakMethod(own)
        self.kind = (form, eps, weight.shape, weight.dtype)

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == self.weight.dtype:
            # imported late, because there may be no Triton where nothing is supported
            from kvcli.kernels.rms_norm.fused import rms_norm as fused

            return fused(hidden, self.weight, self._eps, self._form)
        own = self._own()
        assert own is not None
        return own(hidden)


@torch.no_grad()
def norm_(root: nn.Module) -> int:
    """Replace the forward of all norms below `root` that are found to be RMSNorm. Return how many."""
    done = 0
    for module in root.modules():
        weight = module._parameters.get("weight")
        epsilons = [v for k, v in vars(module).items() if "eps" in k and isinstance(v, float)]
        if weight is None or weight.dim() != 1 or len(epsilons) != 1:
            continue
        if len(list(module.parameters())) > 1 or list(module.children()) or "forward" in vars(module):
            continue
        if len(signature(module.forward).parameters) > 1:  # a gate, which norms of recurrent layers take
            continue
        if (forward := _same(module, weight.detach(), epsilons[0])) is not None:
            module.forward = forward
            done += 1
    return done


def _same(module: nn.Module, weight: Tensor, eps: float) -> NativeNorm | FusedNorm | None:
    """Return a forward that computes the same; None if there is none."""
    is_fused = not triton_support.why_not(weight.device, weight.dtype)
    if not is_fused and why_not(weight):
        return None
    x = trial_rows(weight)
    if (theirs := probe_output(module, x)) is None or theirs.shape != x.shape:
        return None
    for form in FORMS:
        if is_fused:
            ours = FusedNorm(weight, eps, form, module.forward)
            if _nearly_equal(ours(x), theirs):
                return ours
        elif torch.equal(rms_norm(x, norm := norm_of(weight, eps, form)), theirs):
            return NativeNorm(weight, norm, module.forward)
    return None


def _nearly_equal(ours: Tensor, theirs: Tensor) -> bool:
    """True if at most one number in a hundred differs, by at most about two steps of the dtype."""
    near = torch.allclose(ours.float(), theirs.float(), rtol=2 * torch.finfo(ours.dtype).eps, atol=0)
    return near and bool((ours == theirs).float().mean() > 0.99)


def trial_rows(weight: Tensor) -> Tensor:
    """Return probe rows [35, H] of all magnitudes of the dtype, with outlier channels."""
    noise = torch.Generator().manual_seed(weight.shape[0])
    x = torch.randn(5, 7, weight.shape[0], generator=noise)
    x[:, 3:, ::37] *= 60
    x = (x * torch.tensor([1e-6, 1e-3, 0.3, 20.0, 1e4]).view(5, 1, 1)).flatten(0, 1)
    most = torch.finfo(weight.dtype).max  # float16 would overflow to infinity, by which no norm can be recognized
    return x.clamp(-most, most).to(weight.device, weight.dtype)
