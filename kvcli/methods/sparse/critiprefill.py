"""The settings of CritiPrefill (Lv et al., arXiv 2409.12490); its index is middles.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.kv.sparse.settings import MinMax
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.kv.sparse.index import PageIndex


@dataclass(frozen=True)
class CritiPrefill(MinMax):
    """CritiPrefill (Lv et al., 2024, arXiv 2409.12490): for prompts, pages whose extreme keys suit a segment's middle.

    With a quarter of the text read, the demo answers 2 of 3 lookups in 2,000 tokens (measurements/lab-log.md).
    """

    floor: Annotated[int, Range(1)] = 2048  # tokens read per KV head; smaller tiers are read in full
    segment: Annotated[int, Range(1)] = 512  # tokens of a prompt that select together, in one pass
    page: Annotated[int, Range(1)] = 32  # tokens per page

    of_answers = False

    def index(self) -> PageIndex:
        from kvcli.methods.sparse import middles

        return middles.Middles(self.page)
