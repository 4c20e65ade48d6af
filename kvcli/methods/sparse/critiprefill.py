"""The settings of CritiPrefill (Lv et al., arXiv 2409.12490); its index is middles.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.methods.sparse.prompt_selection import PromptSelection
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.kv.sparse.index import PageIndex


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

    def index(self) -> PageIndex:
        from kvcli.methods.sparse.middles import Middles

        return Middles(self.page)

    def _per_slot(self, head_dim: int, number: int) -> float:
        return 2 * head_dim * number / self.page
