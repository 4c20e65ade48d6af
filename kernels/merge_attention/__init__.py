"""Merge partial attention results by their log-sum-exp, which makes every split of the KV cache exact.

Attention over a union of slots is the average of the attentions over its parts, weighted by the softmax mass of each
part (FlashAttention, arXiv 2205.14135; cascade merging, arXiv 2501.01005). Parts may be on any tier, in any order; a
part in which a row sees no slot has weight zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels import triton_support
from kvcli.kernels.merge_attention.reference import merge_attention as _reference


# not frozen, because one is created in each layer of a pass, and freezing takes four times as long
@dataclass(slots=True)
class PartialAttention:
    """Partial attention: the result over some slots."""

    out: Tensor  # [H, N, D], softmax-weighted values; any float type
    # [H, N] float32 (float64 for float64), natural log of the softmax mass; -inf = no slot visible, out is 0
    lse: Tensor


def merge_attention(parts: Sequence[PartialAttention]) -> Tensor:
    """Merge partial results of the same rows -> [H, N, D]; a single result is returned unchanged, several in the dtype
    of `lse`. A row without visible slots gives 0."""
    if len(parts) == 1:
        return parts[0].out
    lse = parts[0].lse
    if (
        lse.device.type == "cuda"
        and lse.dtype == torch.float32
        and not triton_support.why_not(lse.device, torch.bfloat16)
    ):
        # two parts in the same way, because a tier that is added later must not change the formula, and with it the
        # bits
        from kvcli.kernels.merge_attention.fused import merge_attention as fused  # only where Triton is supported

        return fused([p.out for p in parts], [p.lse for p in parts])[0]
    if len(parts) == 2:  # plain decoding; the same sum in four calls instead of ten
        a, b = parts
        share = torch.sigmoid(a.lse - b.lse).nan_to_num_(0.0).unsqueeze(-1)  # weight of a; NaN: no slot visible in both
        return torch.lerp(b.out.to(share.dtype), a.out.to(share.dtype), share)
    return _reference([p.out for p in parts], [p.lse for p in parts])
