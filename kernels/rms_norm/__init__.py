"""RMSNorm in bf16 and float32 on a CPU, row by row, bit for bit equal to PyTorch (arXiv 1910.07467).

x [..., H], weight [H] of one dtype -> [..., H]. Model families round in different places (FORMS). reference.py defines
each form; module.py finds the form of a model's module by probe rows.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels.rms_norm import reference

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
