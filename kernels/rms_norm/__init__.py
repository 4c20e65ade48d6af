"""RMSNorm in bf16 and float32 on a CPU, row by row, bit for bit equal to PyTorch (arXiv 1910.07467).

x [..., H], weight [H] of one dtype -> [..., H]. Model families round in different places (FORMS). reference.py defines
each form; probe rows find that of a model's module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from kvcli.kernels import native as built
from kvcli.kernels import triton_support
from kvcli.kernels.module_probe import probe_output
from kvcli.kernels.rms_norm import reference
from kvcli.kernels.rms_norm.reference import RMS

FORMS = ("round first", "one more", "round last")  # Llama, Gemma, OLMo 2: in the order of native/c/layer.c
SERVED = (torch.bfloat16, torch.float32)


class Norm(ctypes.Structure):
    """The struct of native/c/layer.c. It stores the weight's address, so it must not outlive the weight."""

    _fields_ = [
        ("w", ctypes.c_void_p),
        ("H", ctypes.c_int64),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("form", "lanes", "is_wide")),
    ]


def why_not(weight: Tensor) -> str:
    """Return why a norm with this weight [H] is not supported; "" if it is."""
    if built.native() is None:
        return built.why_not()
    if weight.device.type != "cpu" or weight.dtype not in SERVED or not weight.is_contiguous():
        return f"{weight.dtype} on {weight.device.type}: only bf16 and float32 on a CPU"
    if not lanes() or weight.shape[0] < lanes():
        return f"{weight.shape[0]} numbers, which this PyTorch adds up in an order of its own"
    return ""


def norm_of(weight: Tensor, eps: float, form: str) -> Norm:
    """Return the struct that `rms_norm` needs for a module."""
    return _norm(weight, eps, form, lanes())


def _norm(weight: Tensor, eps: float, form: str, lanes: int) -> Norm:
    is_wide = weight.dtype == torch.float32
    return Norm(weight.data_ptr(), weight.shape[0], eps, FORMS.index(form), lanes, is_wide)


@cache
def lanes() -> int:
    """Return the vector lanes in which this PyTorch sums a row; 0 if its order of summation is not known."""
    x, weight = torch.randn(64, 4099, generator=torch.Generator().manual_seed(0)), torch.ones(4099)
    wanted = reference.rms_norm(x, weight, 1e-6, FORMS[0])
    ours = (n for n in (8, 4, 16) if torch.equal(rms_norm(x, _norm(weight, 1e-6, FORMS[0], n)), wanted))
    return next(ours, 0)


def rms_norm(x: Tensor, norm: Norm, *, level: str | None = None) -> Tensor:
    """Compute x [..., H] in the weight's dtype -> [..., H]. `level`: a lesser kind of CPU than the best available."""
    functions = built.native(level)
    assert functions is not None
    if x.shape[-1] != norm.H:
        raise ValueError(f"rows of {x.shape[-1]} numbers for a weight of {norm.H}")
    x = x.contiguous()
    y = torch.empty_like(x)
    functions.rms_norm(ctypes.addressof(norm), x.data_ptr(), y.data_ptr(), x.numel() // norm.H)
    return y


# Replace a model's RMSNorm by a native or fused one, if both agree on probe rows.
#
# The native norm must give the bits of PyTorch. On a GPU PyTorch's order of summation depends on the number of rows, so
# there a few numbers may be rounded differently; with another form a tenth of them would be.


class NativeNorm:
    """Forward of one norm. It references its weight but no module, because a reference would keep the model alive."""

    def __init__(self, weight: Tensor, norm: Norm, own: Callable[[Tensor], Tensor]) -> None:
        """Set up the norm. `own`: the module's forward, for rows of another dtype than its weight's."""
        self.weight, self.norm, self._own = weight, norm, WeakMethod(own)
        self.kind = (norm.form, norm.eps, weight.shape, weight.dtype)

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == self.weight.dtype:
            return rms_norm(hidden, self.norm)
        own: Any = self._own()
        return own(hidden)


class FusedNorm:
    """Forward of one norm on a GPU. With a gate, as in recurrent layers, the result is multiplied by its SiLU."""

    def __init__(self, norm: RMS, own: Callable[..., Tensor]) -> None:
        self.weight, self.norm, self._own = norm.weight, norm, WeakMethod(own)
        self.kind = (norm.form, norm.eps, norm.weight.shape, norm.weight.dtype)

    def __call__(self, hidden: Tensor, gate: Tensor | None = None) -> Tensor:
        if hidden.dtype == self.weight.dtype:
            # imported late, because there may be no Triton where nothing is supported
            from kvcli.kernels.rms_norm.fused import rms_norm as fused

            normed = fused(hidden, self.norm)
            return normed if gate is None else (normed * silu(gate.float())).to(normed.dtype)
        own: Any = self._own()
        return own(hidden) if gate is None else own(hidden, gate)


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
        _, *others = signature(module.forward).parameters
        if others not in ([], ["gate"]):
            continue
        if (forward := _same(module, weight.detach(), epsilons[0], has_gate=bool(others))) is not None:
            module.forward = forward
            done += 1
    return done


def _same(module: nn.Module, weight: Tensor, eps: float, *, has_gate: bool) -> NativeNorm | FusedNorm | None:
    """Return a forward that computes the same; None if there is none."""
    is_fused = not triton_support.why_not(weight.device, weight.dtype)
    if not is_fused and (has_gate or why_not(weight)):
        return None
    x = trial_rows(weight)
    gates = [torch.linspace(-3, 3, x.shape[1]).to(x).expand_as(x)] * has_gate
    if (theirs := probe_output(lambda rows: module(rows, *gates), x)) is None or theirs.shape != x.shape:
        return None
    for form in FORMS:
        if is_fused:
            ours = FusedNorm(RMS(weight, eps, form), module.forward)
            if _nearly_equal(ours(x, *gates), theirs):
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
