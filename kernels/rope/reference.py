"""Rotate and un-rotate keys in plain PyTorch: (a, b) -> (a cos - b sin, b cos + a sin), and the inverse.

Slots are processed in blocks, so that intermediate tensors are small.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 2048  # slots


def rotate(k: Tensor, pos: Tensor, inv_freq: Tensor, scaling: float, interleaved: bool) -> Tensor:
    return _turned(k, pos, inv_freq, scaling, interleaved, back=False)


def unrotate(k: Tensor, pos: Tensor, inv_freq: Tensor, scaling: float, interleaved: bool) -> Tensor:
    return _turned(k, pos, inv_freq, scaling, interleaved, back=True)


def _turned(k: Tensor, pos: Tensor, inv_freq: Tensor, scaling: float, interleaved: bool, *, back: bool) -> Tensor:
    dims, wide = 2 * inv_freq.shape[0], torch.promote_types(k.dtype, torch.float32)
    out = k.clone(memory_format=torch.contiguous_format)
    for first in range(0, k.shape[-2], BLOCK):
        rows = slice(first, first + BLOCK)
        angle = pos[..., rows].float().unsqueeze(-1) * inv_freq.float()  # [..., S, R/2]
        cos, sin = ((f(angle) * scaling).to(wide) for f in (torch.cos, torch.sin))
        if back:
            size = cos.square() + sin.square()
            cos, sin = cos / size, -sin / size
        a, b = _pairs(k[..., rows, :dims], interleaved)
        to_a, to_b = _pairs(out[..., rows, :dims], interleaved)
        to_a.copy_(a * cos - b * sin)
        to_b.copy_(b * cos + a * sin)
    return out


def _pairs(k: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the two channels of each pair, [..., R/2] each, as views."""
    half = k.shape[-1] // 2
    return (k[..., ::2], k[..., 1::2]) if interleaved else (k[..., :half], k[..., half:])
