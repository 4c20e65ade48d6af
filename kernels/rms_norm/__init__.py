"""RMSNorm in bf16 and float32 on a CPU, row by row and bit for bit as PyTorch gives it (arXiv 1910.07467).

x [..., H], weight [H] of one type -> [..., H]. Families round in different places (FORMS): reference.py says what each
form computes, trial rows which of them a model's module is (module.py).
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels.rms_norm import reference

FORMS = ("round first", "one more", "round last")  # Llama, Gemma, OLMo 2: as native/c/layer.c counts them
SERVED = (torch.bfloat16, torch.float32)


class Norm(ctypes.Structure):
    """As in native/c/layer.c; holds the weight's address, so it lives no longer than the weight."""

    _fields_ = [
        ("w", ctypes.c_void_p),
        ("H", ctypes.c_int64),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("form", "lanes", "is_wide")),
    ]


def why_not(weight: Tensor) -> str:
    """Why a norm with this weight [H] is not served; "" if it is."""
    if built.native() is None:
        return built.why_not()
    if weight.device.type != "cpu" or weight.dtype not in SERVED or not weight.is_contiguous():
        return f"{weight.dtype} on {weight.device.type}: only bf16 and float32 on a CPU"
    if not lanes() or weight.shape[0] < lanes():
        return f"{weight.shape[0]} numbers, which this PyTorch adds up in an order of its own"
    return ""


def norm_of(weight: Tensor, eps: float, form: str) -> Norm:
    """What `rms_norm` is told of a module."""
    return _norm(weight, eps, form, lanes())


def _norm(weight: Tensor, eps: float, form: str, lanes: int) -> Norm:
    is_wide = weight.dtype == torch.float32
    return Norm(weight.data_ptr(), weight.shape[0], eps, FORMS.index(form), lanes, is_wide)


@cache
def lanes() -> int:
    """Of the vectors in which this PyTorch adds up a row; 0 where it adds in another order than those we know."""
    x, weight = torch.randn(64, 4099, generator=torch.Generator().manual_seed(0)), torch.ones(4099)
    wanted = reference.rms_norm(x, weight, 1e-6, FORMS[0])
    ours = (n for n in (8, 4, 16) if torch.equal(rms_norm(x, _norm(weight, 1e-6, FORMS[0], n)), wanted))
    return next(ours, 0)


def rms_norm(x: Tensor, norm: Norm, *, level: str | None = None) -> Tensor:
    """x [..., H] in the weight's type -> [..., H]. `level`: another kind of CPU than the best there is."""
    functions = built.native(level)
    assert functions is not None
    if x.shape[-1] != norm.H:
        raise ValueError(f"rows of {x.shape[-1]} numbers for a weight of {norm.H}")
    x = x.contiguous()
    y = torch.empty_like(x)
    functions.rms_norm(ctypes.addressof(norm), x.data_ptr(), y.data_ptr(), x.numel() // norm.H)
    return y
