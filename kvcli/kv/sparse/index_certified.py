"""Page index of int8 keys and the norm of each key's quantization error: its scores are rigorous, tight upper bounds.

|q . k - q . k8| <= |q| |k - k8|, so q . k8 + |q| e is never below the score of a key whose error has norm e.
The index takes a quarter of the bytes of bf16 keys and values, plus 4 bytes per token. e includes the float errors of
the products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.kernels.page_scores import QuantizedPages, page_scores, why_not
from kvcli.kernels.quantized_key_scores import code_scores
from kvcli.kv.slots import AttentionParams
from kvcli.kv.sparse.index import ContiguousPageIndex, Numbers, by_page, scale_and_softcap

FLOAT = 2.0**-22  # error of each summed product, as a share of |q| |k|: four roundings in float32


@dataclass(frozen=True)
class Certified(ContiguousPageIndex):
    """Page index of int8 keys, with a scale and an error norm per token."""

    is_bound = True

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Quantize k [K, P, page, D] -> codes int8 [K, P, page, D], scales and error norms [K, P, page]."""
        k = k.to(torch.promote_types(k.dtype, torch.float32))
        scale = _up(k.abs().amax(-1).clamp_min(1e-30) / 127)
        wide = scale.to(k.dtype).unsqueeze(-1)
        codes = (k / wide).round()
        error = (k - codes * wide).norm(dim=-1) + k.shape[-1] * FLOAT * k.norm(dim=-1)
        return codes.to(torch.int8), scale, _up(error)

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score pages by an upper bound on the score of every token."""
        codes, scale, error = pages
        if not why_not(rows):
            coded = QuantizedPages(codes.flatten(1, 2), scale.flatten(1), error.flatten(1))
            return page_scores(rows, coded, self.page, params.scale, params.softcap)
        score = code_scores(rows, codes.flatten(1, 2), scale.flatten(1))
        length = rows.to(score.dtype).norm(dim=-1, keepdim=True)  # [K, R, 1]
        bound = torch.addcmul(score, length, error.flatten(1).to(score.dtype).unsqueeze(1))
        return by_page(scale_and_softcap(bound, params), self.page)


def _up(x: Tensor) -> Tensor:
    """Round up to bfloat16; rounding to nearest could lose at most 2^-8."""
    return (x * (1 + 2.0**-7)).to(torch.bfloat16)
