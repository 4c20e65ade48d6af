"""What Triton's interpreter lacks to stand for a GPU: numbers in bf16, and products whose rows do not depend on M.

Triton 3.9's interpreter keeps bf16 as 16-bit integers and computes with the bit patterns, without a word; it cuts off
what a GPU rounds to bf16, and takes integers for its bits. Its products are numpy's, whose sums depend on the shape:
here an element of a product is a sum over k in steps of 16, in order, as matrix units compute it. So what then differs
between 1 row and 32 is the kernel's own doing.
Import this before any `fused` module: whether a kernel is interpreted is decided where it is defined.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

STEP = 16  # of k, in one instruction of the matrix units


def _wide(handle: Any) -> np.ndarray:
    """Its numbers, in float32 if they are of a narrower float type."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32) if handle.dtype.is_floating() else handle.data


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    x, y, out = _wide(a).astype(d.data.dtype), _wide(b).astype(d.data.dtype), d.data.copy()  # [.., M, K], [.., K, N]
    for k in range(0, x.shape[-1], STEP):
        part = np.zeros_like(out)
        for i in range(k, min(k + STEP, x.shape[-1])):
            part += x[..., i : i + 1] * y[..., i : i + 1, :]
        out += part
    return interpreter.TensorHandle(out, d.dtype.scalar)


_binary: Callable[..., Any] = interpreter.InterpreterBuilder.binary_op


def _binary_op(self: Any, left: Any, right: Any, op: Callable[..., Any]) -> Any:
    kind = left.dtype.scalar
    if kind != tl.bfloat16 or right.dtype.scalar != tl.bfloat16:
        return _binary(self, left, right, op)
    found = op(_wide(left), _wide(right))
    if found.dtype != np.float32:  # a comparison
        return interpreter.TensorHandle(found, tl.int1)
    return interpreter.TensorHandle(_narrow(found), kind)


def _narrow(wide: np.ndarray) -> np.ndarray:
    """float32 as bf16's bits: the nearest, of two as near the even one."""
    bits = np.asarray(wide, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(wide), 0x7FC0, rounded).astype(np.uint16)


_cast: Callable[..., Any] = interpreter.InterpreterBuilder.cast_impl


def _cast_impl(self: Any, src: Any, kind: Any) -> Any:
    if src.dtype.scalar == tl.bfloat16:
        src = interpreter.TensorHandle(_wide(src), tl.float32)
    if kind.scalar == tl.bfloat16:
        return interpreter.TensorHandle(_narrow(src.data), tl.bfloat16)
    return _cast(self, src, kind)


interpreter.InterpreterBuilder.cast_impl = _cast_impl
interpreter.InterpreterBuilder.create_fp_to_fp = lambda self, src, kind, _: _cast_impl(self, src, kind)
interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.binary_op = _binary_op
