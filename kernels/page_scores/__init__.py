"""Scores of stored pages for rows that choose what they read: the log of the softmax mass that each page may hold.

A page is a run of `page` slots of which something small is kept: `QuantizedPages` keys, or the `Box` that they lie in.
Natively, and for float32 and bf16 alone: a row's scores are chains over its own numbers, so what it chooses does not
depend on who else is in the pass. `why_not` says what is not served; torch's products serve that (code_scores,
page_bounds), and round by the number of rows.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels import native as built
from kvcli.kernels.page_scores import reference

SCORES, MASSES = struct.Struct("8P6q2f"), struct.Struct("3P5q")  # the structures of native/c/page_scores.c
BITS = {torch.int8: 8, torch.uint8: 2, torch.bfloat16: 16, torch.float32: 32}


@dataclass(frozen=True, slots=True)
class QuantizedPages:
    """Keys as small whole numbers: a key is about mean + spread * scale * code, at most a length of `error` off it."""

    codes: Tensor  # [K, S, D] int8, or [K, S, D / 4] uint8 as `code_scores.pack2` packs -3, -1, 1, 3
    scale: Tensor  # [K, S] bf16
    error: Tensor | None = None  # [K, S] bf16: scores are upper bounds then
    mean: Tensor | None = None  # [K, D] float32
    spread: Tensor | None = None  # [K, D] float32


@dataclass(frozen=True, slots=True)
class Box:
    """The least and the largest number of each channel of a page's keys; a score is that of the best corner."""

    low: Tensor  # [K, P, D] bf16 or float32
    high: Tensor


def why_not(rows: Tensor) -> str:
    """Why rows [K, R, D] are not served; "" if they are."""
    if built.native() is None:
        return built.why_not()
    if rows.device.type != "cpu" or rows.dtype not in (torch.bfloat16, torch.float32):
        return f"{rows.dtype} on {rows.device.type}: only bf16 and float32 on a CPU"
    return ""


def page_scores(
    rows: Tensor, of: QuantizedPages | Box, page: int, scale: float, softcap: float, *, level: str | None = None
) -> Tensor:
    """rows [K, R, D] -> [K, R, P] float32. `page`: slots of a page of coded keys; a box is a page."""
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
    """x [K, G, N, P] float32, mask [K, N, P] or [K, P] bool -> [K, G, N], the log of the sum of e^x where it is set.

    Other numbers than float32 on a CPU are summed up by torch.
    """
    functions = built.native(level)
    if functions is None or x.dtype != torch.float32 or x.device.type != "cpu":
        return reference.log_masses(x, mask)
    x, mask = x.contiguous(), mask.contiguous()
    out = torch.empty(x.shape[:3])
    functions.log_masses(MASSES.pack(x.data_ptr(), mask.data_ptr(), out.data_ptr(), *x.shape, mask.dim() == 2))
    return out
