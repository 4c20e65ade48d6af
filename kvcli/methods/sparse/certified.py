"""Sparse attention by int8 keys and the norm of each key's quantization error: scores are rigorous, tight upper bounds.

|q . k - q . k8| <= |q| |k - k8|, so q . k8 + |q| e is never below the score of a key whose error has norm e.
The index takes a quarter of the bytes of bf16 keys and values, plus 4 bytes per token. e includes the float errors of
the products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.kv.sparse.index import by_page, scale_and_softcap, widened
from kvcli.methods.sparse.page_selection import PER_PAGE, PageSelection
from kvcli.settings.schema import Exactness, Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.kv.slots import AttentionParams
    from kvcli.kv.sparse.index import Numbers

FLOAT = 2.0**-22  # error of each summed product, as a share of |q| |k|: four roundings in float32


@dataclass(frozen=True)
class Certified(PageSelection):
    """Certified (kvcli's own): pages with the highest int8 score bounds, or all if they may miss more than `epsilon`.

    The demo finds all facts in a report; of 3,811 bytes per token, 564 are the index (measurements/kv-cache.md).
    """

    page: Annotated[int, Range(1)] = 4  # tokens per page
    epsilon: Annotated[float, Range(0, below=1)] = 0.01  # maximum share of attention that a head may miss

    exactness_label: ClassVar[Exactness] = "certified"
    is_bound = True

    def allowance(self) -> float | None:
        return self.epsilon

    def _per_slot(self, head_dim: int, number: int) -> float:
        return head_dim + 4 + PER_PAGE / self.page

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Quantize k [K, P, page, D] -> codes int8 [K, P, page, D], scales and error norms [K, P, page]."""
        k = widened(k)
        scale = _up(k.abs().amax(-1).clamp_min(1e-30) / 127)
        wide = scale.to(k.dtype).unsqueeze(-1)
        codes = (k / wide).round()
        error = (k - codes * wide).norm(dim=-1) + k.shape[-1] * FLOAT * k.norm(dim=-1)
        return codes.char(), scale, _up(error)

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score pages by an upper bound on the score of every token."""
        from kvcli.kernels.page_scores import QuantizedPages, page_scores, why_not
        from kvcli.kernels.quantized_key_scores import code_scores

        codes, scale, error = pages
        if not why_not(rows):
            coded = QuantizedPages(codes.flatten(1, 2), scale.flatten(1), error.flatten(1))
            return page_scores(rows, coded, self.page, params.scale, params.softcap)
        score = code_scores(rows, codes.flatten(1, 2), scale.flatten(1))
        length = rows.to(score.dtype).norm(dim=-1, keepdim=True)  # [K, R, 1]
        bound = score.addcmul(length, error.flatten(1).to(score.dtype).unsqueeze(1))
        return by_page(scale_and_softcap(bound, params), self.page)


def _up(x: Tensor) -> Tensor:
    """Round up to bfloat16; rounding to nearest could lose at most 2^-8."""
    return (x * (1 + 2.0**-7)).bfloat16()
