"""Scores of stored pages for sparse attention: the log of the softmax mass that each page may have for a row.

A page is `page` consecutive slots with a small summary: quantized keys (`QuantizedPages`), or the `Box` that contains
them. Native kernels only, for float32 and bf16: a row's scores are chains over its own numbers, so its page selection
is batch invariant. `why_not` returns why other cases are not supported. Torch's products serve these
(quantized_key_scores, page_bounds), and their rounding depends on the number of rows.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels.page_scores import reference
from kvcli.kernels.page_scores.reference import Box, QuantizedPages

SCORES, MASSES = struct.Struct("8P6q2f"), struct.Struct("3P5q")  # the structures of native/c/page_scores.c
BITS = {torch.int8: 8, torch.uint8: 2, torch.bfloat16: 16, torch.float32: 32}


def why_not(rows: Tensor) -> str:
    """Return why rows [K, R, D] are not supported; "" if they are."""
    if built.native() is None:
        return built.why_not()
    if rows.device.type != "cpu" or rows.dtype not in (torch.bfloat16, torch.float32):
        return f"{rows.dtype} on {rows.device.type}: only bf16 and float32 on a CPU"
    return ""


def page_scores(
    rows: Tensor, of: QuantizedPages | Box, page: int, scale: float, softcap: float, *, level: str | None = None
) -> Tensor:
    """Score rows [K, R, D] -> [K, R, P] float32. `page`: slots per page of quantized keys; a box is one page."""
    functions = built.native(level)
    assert functions is not None
    rows = rows.to(torch.float32).contiguous()
    k, r, d = rows.shape
    if isinstance(of, Box):
        first, page = of.low, 1
        held = [of.low.contiguous(), of.high.contiguous(), None, None, None, None]
    else:
        first = of.codes
        held = [None if t is None else t.contiguous() for t in (of.codes, None, of.scale, of.error, of.mean, of.spread)]
    s = first.shape[1]
    out = torch.empty(k, r, s // page)
    at = (0 if t is None else t.data_ptr() for t in (rows, *held, out))
    functions.page_scores(SCORES.pack(*at, k, r, d, s, page, BITS[first.dtype], scale, softcap))
    return out


def log_masses(x: Tensor, mask: Tensor, *, level: str | None = None) -> Tensor:
    """Sum e^x where the mask is set: x [K, G, N, P] float32, mask [K, N, P] or [K, P] bool -> logarithms [K, G, N].

    Other dtypes and devices than float32 on a CPU use torch.
    """
    functions = built.native(level)
    if functions is None or x.dtype != torch.float32 or x.device.type != "cpu":
        return reference.log_masses(x, mask)
    x, mask = x.contiguous(), mask.contiguous()
    out = torch.empty(x.shape[:3])
    functions.log_masses(MASSES.pack(x.data_ptr(), mask.data_ptr(), out.data_ptr(), *x.shape, mask.dim() == 2))
    return out


__all__ = ["Box", "QuantizedPages", "log_masses", "page_scores", "why_not"]
