"""Scores of pages in plain PyTorch, from dequantized keys: the specification of `page_scores`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.quantized_key_scores import unpack2


@dataclass(frozen=True, slots=True)
class QuantizedPages:
    """Quantized keys of pages: a key is about mean + spread * scale * code, with an error of norm `error` at most."""

    codes: Tensor  # [K, S, D] int8, or [K, S, D / 4] uint8 as `quantized_key_scores.pack2` packs -3, -1, 1, 3
    scale: Tensor  # [K, S] bf16
    error: Tensor | None = None  # [K, S] bf16: if given, scores are upper bounds
    mean: Tensor | None = None  # [K, D] float32
    spread: Tensor | None = None  # [K, D] float32


@dataclass(frozen=True, slots=True)
class Box:
    """Minimum and maximum of each channel of a page's keys; the score of a box is that of its best corner."""

    low: Tensor  # [K, P, D] bf16 or float32
    high: Tensor


def of_box(rows: Tensor, box: Box, scale: float, softcap: float) -> Tensor:
    """Score rows [K, R, D] -> [K, R, P]."""
    q = rows.unsqueeze(2)  # [K, R, 1, D]
    corner = torch.maximum(q * box.low.to(q).unsqueeze(1), q * box.high.to(q).unsqueeze(1))
    return bend(corner.sum(-1), scale, softcap)


def of_codes(rows: Tensor, coded: QuantizedPages, page: int, scale: float, softcap: float) -> Tensor:
    """Score rows [K, R, D] -> [K, R, P]."""
    codes = coded.codes if coded.codes.dtype == torch.int8 else unpack2(coded.codes, rows.shape[2])
    key = codes.to(rows) * coded.scale.to(rows).unsqueeze(2)
    if coded.spread is not None:
        key = key * coded.spread.to(rows).unsqueeze(1)
    if coded.mean is not None:
        key = key + coded.mean.to(rows).unsqueeze(1)
    score = rows @ key.transpose(1, 2)
    if coded.error is not None:
        score = score + rows.norm(dim=-1, keepdim=True) * coded.error.to(rows).unsqueeze(1)
    return bend(score, scale, softcap).unflatten(2, (-1, page)).logsumexp(-1)


def bend(score: Tensor, scale: float, softcap: float) -> Tensor:
    """Apply the layer's scale and softcap to products of queries and keys."""
    score = score * scale
    return softcap * torch.tanh(score / softcap) if softcap > 0 else score


def log_masses(x: Tensor, mask: Tensor) -> Tensor:
    """Sum x [K, G, N, P], mask [K, N, P] or [K, P] -> [K, G, N]."""
    mask = mask.unsqueeze(1) if mask.dim() == 3 else mask[:, None, None]
    return x.masked_fill(~mask, -torch.inf).logsumexp(-1)
