"""Merge partial attention results into one: the log-sum-exp identity behind every split of the past.

Attention over a union of slots is the average of the attentions over its pieces, weighted by the softmax mass of
each piece (FlashAttention, arXiv 2205.14135; cascade merging, arXiv 2501.01005). Pieces may live on any tier, in any
order; a piece nobody may see weighs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels import triton_support
from kvcli.kernels.merge_attention.reference import merge_attention as _reference


@dataclass(slots=True)  # not frozen: one is made in each layer of a pass, and freezing takes four times as long
class PartialAttention:
    """Attention over some slots."""

    out: Tensor  # [H, N, D], softmax-weighted values; any float type
    lse: Tensor  # [H, N] float32 (float64 for float64), natural log of the softmax mass; -inf = saw nothing, out is 0


def merge_attention(parts: Sequence[PartialAttention]) -> Tensor:
    """Parts of the same rows -> [H, N, D]: one part as it is, several in the type of `lse`. Nothing seen gives 0."""
    if len(parts) == 1:
        return parts[0].out
    lse = parts[0].lse
    if (
        lse.device.type == "cuda"
        and lse.dtype == torch.float32
        and not triton_support.why_not(lse.device, torch.bfloat16)
    ):
        # two parts as any number: a rung that appears must not change the formula, and with it bits
        from kvcli.kernels.merge_attention.fused import merge_attention as fused  # Triton is imported where it serves

        return fused([p.out for p in parts], [p.lse for p in parts])[0]
    if len(parts) == 2:  # plain decoding; the same sum in four calls instead of ten
        a, b = parts
        share = torch.sigmoid(a.lse - b.lse).nan_to_num_(0.0).unsqueeze(-1)  # of a; NaN: neither saw anything
        return torch.lerp(b.out.to(share.dtype), a.out.to(share.dtype), share)
    return _reference([p.out for p in parts], [p.lse for p in parts])
