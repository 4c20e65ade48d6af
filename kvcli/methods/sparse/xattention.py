"""XAttention: segments of a prompt select pages by antidiagonal sums of scores (Xu et al., arXiv 2503.16428).

Rows and keys are cut into groups of `stride`. The first key of a group meets the last row of another, the second key
the row before it, and so on: the mean of these scores stands for all of both groups, so each key and each row counts
once for each group of the other side. That is 1 / stride of the products of attention. The paper's masks are for blocks
of 128 rows; here they are for a segment of a prompt, of any length. Scores are matrix products, which round differently
for other numbers of pages, but a segment always selects from the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from kvcli.kv.sparse.index import by_page, scale_and_softcap, widened
from kvcli.methods.sparse.prompt_selection import PromptSelection
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.kv.slots import AttentionParams
    from kvcli.kv.sparse.index import Numbers


@dataclass(frozen=True)
class XAttention(PromptSelection):
    """XAttention (Xu et al., 2025, arXiv 2503.16428): for prompts, pages with the highest antidiagonal sums of scores.

    Behind 8,192 tokens of noise, a `mass` of 0.25 reads 63% of the pages: 1.13 times as fast (measurements/lab-log.md).
    """

    mass: Annotated[float, Range(above=0, below=1)] = 0.9  # share of the attention that the selected pages hold
    stride: Annotated[int, Range(1)] = 8  # tokens per group, of which one score is computed for another group

    def __post_init__(self) -> None:
        if self.page % self.stride:
            raise ValueError(f"page = {self.page} is no multiple of stride = {self.stride}")

    @property
    def share_read(self) -> str:
        return f"{self.mass:.0%} of the attention"

    @property
    def limits(self) -> tuple[float, float]:
        return 0.0, self.mass

    def _per_slot(self, head_dim: int, number: int) -> float:
        return head_dim * number

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Join the keys k [K, P, page, D] of each group -> [K, P, page / stride, stride * D]."""
        return (k.reshape(*k.shape[:2], -1, self.stride * k.shape[3]),)

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score pages by the mean scores of antidiagonals, for the groups of segments [K, G, N, D] -> [K, G, R, P]."""
        from torch.nn.functional import pad

        (keys,), (n_kv, n_queries, n, size) = pages, rows.shape
        whole = pad(rows, (0, 0, 0, -n % self.stride)).view(n_kv, n_queries, -1, self.stride, size)
        groups = widened(whole.flip(3).flatten(3))
        score = groups.flatten(1, 2) @ keys.flatten(1, 2).to(groups.dtype).transpose(1, 2)
        mean = scale_and_softcap(score, replace(params, scale=params.scale / self.stride))
        return by_page(mean, self.page // self.stride).view(*groups.shape[:3], -1)
