"""Gated delta rule and the convolution before it on a CPU, in bf16 or float32. Sums have another order than in the
reference, and e^x may differ in its last bit."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels.gated_delta import SERVED
from kvcli.kernels.gated_delta.reference import FUNCTIONS

_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Rule(ctypes.Structure):
    """The struct of native/c/gated_delta.c."""

    _fields_ = [
        *((name, _P) for name in ("q", "k", "v", "g", "beta", "before", "state", "out")),
        *((name, _L) for name in ("N", "H", "K", "Dk", "Dv", "q_step", "k_step", "v_step")),
        *((name, _I) for name in ("is_wide", "is_normed")),
    ]


class _Conv(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("x", "w", "bias", "y")),
        *((name, _L) for name in ("C", "L", "N", "W")),
        *((name, _I) for name in ("has_silu", "is_wide")),
    ]


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    is_normed: bool = True,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the rule: q, k [N, K, Dk], v [N, H, Dv], g (log decay), beta [N, H], state [H, Dk, Dv] or None = zeros ->
    [N, H, Dv], and the state after the last row, in float32. `level`: a lesser kind of CPU than the best available."""
    q, k, v = (_rows(_served(t).to(v.dtype)) for t in (q, k, v))
    g, beta = (t.float().contiguous() for t in (g, beta))
    before = None if state is None else state.float().contiguous()
    n, heads, dv = v.shape
    behind, out = v.new_empty(heads, k.shape[2], dv, dtype=torch.float32), v.new_empty(n, heads, dv)
    if before is not None and before.shape != behind.shape:
        raise ValueError(f"a state of {tuple(before.shape)}: only {tuple(behind.shape)}")
    places = [_at(t) for t in (q, k, v, g, beta, before, behind, out)]
    sizes = (n, heads, *k.shape[1:], dv, q.stride(0), k.stride(0), v.stride(0))
    rule = _Rule(*places, *sizes, v.dtype == torch.float32, is_normed)
    _native(level).gated_delta(ctypes.addressof(rule))
    return out, behind


def causal_conv(
    x: Tensor, w: Tensor, bias: Tensor | None, n: int, has_silu: bool, *, level: str | None = None
) -> Tensor:
    """Convolve x [C, L], w [C, W], bias [C] or None -> [n, C]: the last n positions, each from its last W inputs."""
    x = _served(x).contiguous()
    w, bias = w.to(x.dtype).contiguous(), None if bias is None else bias.to(x.dtype).contiguous()
    y = x.new_empty(n, len(x))
    places, sizes = [_at(t) for t in (x, w, bias, y)], (*x.shape, n, w.shape[1])
    conv = _Conv(*places, *sizes, has_silu, x.dtype == torch.float32)
    _native(level).causal_conv(ctypes.addressof(conv))
    return y


def numbers(x: Tensor, function: str, *, level: str | None = None) -> Tensor:
    """Apply the elementwise function FUNCTIONS[function] to x [..]."""
    x = _served(x).contiguous()
    y = torch.empty_like(x)
    which = [*FUNCTIONS].index(function)
    _native(level).numbers(x.data_ptr(), y.data_ptr(), x.numel(), which, x.dtype == torch.float32)
    return y


def _native(level: str | None) -> Any:
    functions = built.native(level)
    assert functions is not None
    return functions


def _served(t: Tensor) -> Tensor:
    if t.dtype not in SERVED or t.device.type != "cpu":
        raise ValueError(f"{t.dtype} on {t.device.type}: only bf16 and float32 on a CPU")
    return t


def _rows(t: Tensor) -> Tensor:
    """Return [N, heads, D] with each row contiguous."""
    return t if t.stride(2) == 1 and t.stride(1) == t.shape[2] else t.contiguous()


def _at(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()
