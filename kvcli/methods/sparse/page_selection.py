"""Settings that the sparse methods of answers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from kvcli.kv.footprint import IndexBytes
from kvcli.kv.sparse.index import PageIndex
from kvcli.kv.sparse.settings import SparseMethod
from kvcli.settings.schema import Exactness, Range

if TYPE_CHECKING:
    from kvcli.kv.slots import AttentionParams, KVCache, LowerTier
    from kvcli.kv.sparse.page_source import PageSource, PageTier

# bytes of a selection unit besides its summary (a page, or a slot if pages are read in part): its first and last
# position, and flags for always read, selectable and last selected
PER_PAGE = 11


@dataclass(frozen=True)
class PageSelection(SparseMethod, PageIndex):
    """Settings of sparse attention of answers, and its page index. It applies to the only tier, or to all tiers below
    the first. Prompt tokens attend to the whole KV cache."""

    fraction: Annotated[float, Range(above=0, most=1)] = 0.03  # share of stored tokens that a KV head reads per token
    floor: Annotated[int, Range(1)] = 1024  # minimum of tokens read per KV head; smaller tiers are read in full
    sinks: Annotated[int, Range(0)] = 16  # first tokens, always read
    recent: Annotated[int, Range(0)] = 64  # newest tokens, always read, as are all since the last compression point
    dense_layers: Annotated[int, Range(0)] = 2  # first layers, which read all tokens because their attention is diffuse
    selection_interval: Annotated[int, Range(1)] = 64  # generated tokens between two compression points
    choice: Literal["row", "interval"] = "row"  # select pages for each token, or once per `selection_interval`
    cutoff: Annotated[float, Range(0, below=1)] = 0.0  # skip pages with less than this share of attention; 0 = off

    exactness_label: ClassVar[Exactness] = "approx"

    @property
    def describe_read(self) -> str:
        return f"{self.fraction:.0%} of the text for each token, at least {self.floor:,} tokens"

    def bind(self, store: KVCache, source: PageSource, attention_params: Sequence[AttentionParams | None]) -> KVCache:
        from kvcli.kv.sparse.sparse_tier import SparseCache

        return SparseCache(store, **self._how(source, attention_params))

    def bind_tier(self, tier: PageTier, attention_params: Sequence[AttentionParams | None]) -> LowerTier:
        from kvcli.kv.sparse.sparse_tier import SparseTier

        return SparseTier(tier, **self._how(tier, attention_params))

    def layers(self, attention_params: Sequence[AttentionParams | None]) -> list[int]:
        return [i for i, each in enumerate(attention_params) if i >= self.dense_layers and each and each.window is None]

    def index_bytes(self, head_dim: int, number: int) -> IndexBytes:
        near = 1.25 * self.fraction * 2 * head_dim * number  # with prefetched pages (sparse_tier.AHEAD)
        return IndexBytes(self._per_slot(head_dim, number), 16.0 + self._per_head(head_dim), near)

    def _per_slot(self, head_dim: int, number: int) -> float:
        raise NotImplementedError

    def _per_head(self, head_dim: int) -> float:
        """Return the bytes per head besides its counts of pages and of slots."""
        return 0.0

    def allowance(self) -> float | None:
        """Return the softmax mass that a row may miss; None = not bounded."""
        return None

    def _how(self, source: PageSource, attention_params: Sequence[AttentionParams | None]) -> dict[str, Any]:
        from kvcli.kv.sparse.pages import PageBudget

        return {
            "index": self,
            "budget": PageBudget(self.fraction, self.floor, self.sinks, self.recent),
            "layers": self.layers(attention_params),
            "epsilon": self.allowance(),
            "cutoff": self.cutoff,
            "is_shared": self.choice == "interval",
            "source": source,
        }
