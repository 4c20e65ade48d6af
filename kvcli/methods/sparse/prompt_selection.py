"""Settings that the sparse methods of prompts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvcli.kv.footprint import IndexBytes
from kvcli.kv.sparse.index import PageIndex
from kvcli.kv.sparse.settings import SparseMethod
from kvcli.methods.sparse.page_selection import PER_PAGE
from kvcli.settings.profile import Needs
from kvcli.settings.schema import Exactness, Range

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.kv.slots import AttentionParams, KVCache, LowerTier
    from kvcli.kv.sparse.page_source import PageSource, PageTier
    from kvcli.methods.sparse.segments import PromptSegments


@dataclass(frozen=True)
class PromptSelection(SparseMethod, PageIndex):
    """Settings of sparse attention of prompts, and its page index, which scores the rows of a segment together. It
    applies to the only tier, or to all tiers below the first. Tokens of an answer attend to the whole KV cache."""

    segment: Annotated[int, Range(1)] = 256  # tokens of a prompt that select together, in one pass
    page: Annotated[int, Range(1)] = 128  # tokens per page
    floor: Annotated[int, Range(1)] = 1024  # tokens read per KV head at least; shorter texts are read in full
    sinks: Annotated[int, Range(0)] = 16  # first tokens, always read
    recent: Annotated[int, Range(0)] = 64  # newest tokens before a segment, always read
    dense_layers: Annotated[int, Range(0)] = 2  # first layers, which read all tokens because their attention is diffuse

    exactness_label: ClassVar[Exactness] = "approx"
    # passes over some tokens of a prompt, and KV of other texts, would make other segments
    needs: ClassVar[Needs] = Needs(frozenset({"prunes", "reuses"}), "prompts that are read from first to last token")

    @property
    def describe_read(self) -> str:
        return f"{self.share_read} for each {self.segment} tokens of a prompt, at least {self.floor:,} tokens"

    @property
    def share_read(self) -> str:
        """Share of a long text that a segment reads, in words."""
        raise NotImplementedError

    @property
    def limits(self) -> tuple[float, float]:
        """Share of the stored tokens that a segment may read, and share of the attention at which it reads no more."""
        raise NotImplementedError

    def companion(self, pair: ModelPair) -> PromptSegments:
        from kvcli.methods.sparse.segments import PromptSegments

        return PromptSegments(pair.target, self.segment)

    def bind(self, store: KVCache, source: PageSource, attention_params: Sequence[AttentionParams | None]) -> KVCache:
        from kvcli.methods.sparse.segments import SegmentCache

        return SegmentCache(store, **self._how(source, attention_params))

    def bind_tier(self, tier: PageTier, attention_params: Sequence[AttentionParams | None]) -> LowerTier:
        from kvcli.methods.sparse.segments import SegmentTier

        return SegmentTier(tier, **self._how(tier, attention_params))

    def layers(self, attention_params: Sequence[AttentionParams | None]) -> list[int]:
        return [i for i, each in enumerate(attention_params) if i >= self.dense_layers and each and each.window is None]

    def index_bytes(self, head_dim: int, number: int) -> IndexBytes:
        return IndexBytes(self._per_slot(head_dim, number) + PER_PAGE / self.page, 16.0, 2 * head_dim * number)

    def _per_slot(self, head_dim: int, number: int) -> float:
        raise NotImplementedError

    def _how(self, source: PageSource, attention_params: Sequence[AttentionParams | None]) -> dict[str, Any]:
        from kvcli.kv.sparse.pages import PageBudget

        fraction, mass = self.limits
        budget, layers = PageBudget(fraction, self.floor, self.sinks, self.recent), self.layers(attention_params)
        return {"index": self, "budget": budget, "layers": layers, "mass": mass, "source": source}
