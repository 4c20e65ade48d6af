"""The settings of XAttention (Xu et al., arXiv 2503.16428); its index is antidiagonal.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.kv.sparse.settings import PER_PAGE, PageSelection
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.kv.sparse.index import PageIndex


@dataclass(frozen=True)
class XAttention(PageSelection):
    """XAttention (Xu et al., 2025, arXiv 2503.16428): for prompts, pages with the highest antidiagonal sums of scores.

    With a quarter of the text read, the demo answers 3 of 3 lookups in 2,000 tokens (measurements/lab-log.md).
    """

    fraction: Annotated[float, Range(above=0, most=1)] = 1.0  # share of stored tokens that a KV head reads per segment
    mass: Annotated[float, Range(above=0, most=1)] = 0.9  # select no more pages at this share of attention; 1 = off
    segment: Annotated[int, Range(1)] = 256  # tokens of a prompt that select together, in one pass
    page: Annotated[int, Range(1)] = 128  # tokens per page
    stride: Annotated[int, Range(1)] = 8  # tokens per group, of which one score is computed for another group

    of_answers = False

    def __post_init__(self) -> None:
        if self.page % self.stride:
            raise ValueError(f"page = {self.page} is no multiple of stride = {self.stride}")

    def index(self) -> PageIndex:
        from kvcli.methods.sparse import antidiagonal

        return antidiagonal.Antidiagonal(self.page, self.stride)

    def _per_slot(self, head_dim: int, number: int) -> float:
        return head_dim * number + PER_PAGE / self.page
