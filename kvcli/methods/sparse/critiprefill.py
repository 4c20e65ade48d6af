"""CritiPrefill: segments of a prompt select pages by extreme keys (Lv et al., arXiv 2409.12490).

The published code ranks blocks by the mean over query heads, and mixes in a quarter of the scores of the layer below.
Here units rank by their largest share in any query head of the group, and layers do not know each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.kv.sparse.index import scale_and_softcap
from kvcli.methods.sparse.prompt_selection import PromptSelection
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.kv.slots import AttentionParams
    from kvcli.kv.sparse.index import Numbers


@dataclass(frozen=True)
class CritiPrefill(PromptSelection):
    """CritiPrefill (Lv et al., 2024, arXiv 2409.12490): for prompts, pages whose extreme keys suit a segment's middle.

    Random weights read 16,384 tokens 1.54 times as fast, modelled from timed chunks (measurements/lab-log.md).
    """

    page: Annotated[int, Range(1)] = 32  # tokens per page
    fraction: Annotated[float, Range(above=0, most=1)] = 0.25  # share of stored tokens that a KV head reads per segment

    @property
    def share_read(self) -> str:
        return f"{self.fraction:.0%} of the text"

    @property
    def limits(self) -> tuple[float, float]:
        return self.fraction, 1.0

    def _per_slot(self, head_dim: int, number: int) -> float:
        return 2 * head_dim * number / self.page

    def summarize(self, k: Tensor, shared: Numbers) -> Numbers:
        """Compute low and high [K, P, D] of k [K, P, page, D], in the dtype of the keys."""
        return k.amin(2), k.amax(2)

    def score(self, rows: Tensor, pages: Numbers, shared: Numbers, params: AttentionParams) -> Tensor:
        """Score pages by their minimum or their maximum, whichever is better for the middle of the extreme rows of
        segments [K, G, N, D] -> [K, G, 1, P]."""
        from kvcli.kernels.page_bounds import page_bounds

        middle = (rows.amax(2) + rows.amin(2)) / 2
        low, high = (page_bounds(middle, each, each) for each in pages)
        return scale_and_softcap(low.maximum(high), params).unsqueeze(2)
