"""The `[sparse]` table of a profile: which slots of the KV cache rows read (sparse attention)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from kvcli.kv.footprint import IndexBytes
from kvcli.settings.schema import Exactness, Range

if TYPE_CHECKING:
    from kvcli.kv.companion import Companion
    from kvcli.kv.slots import AttentionParams, KVCache, LowerTier
    from kvcli.kv.sparse.index import PageIndex
    from kvcli.kv.sparse.page_source import PageSource, PageTier

# bytes of a selection unit besides its summary (a page, or a slot if pages are read in part): its first and last
# position, and flags for always read, selectable and last selected
PER_PAGE = 11


class SparseMethod:
    """A method of the table; the defaults are those of full attention. `attention_params`: one entry per layer; None =
    the layer reads another layer's slots."""

    exactness_label: ClassVar[Exactness] = "exact"  # the strictest `exactness` of a profile with this method
    segment: int = 0  # tokens of a prompt that select together, in one pass; 0 = those of prompts read all
    selection_interval: int | None = None  # tokens between two compression points while decoding; None = none needed

    @property
    def describe_read(self) -> str:
        """Share of a long sequence that a row reads, in words; "" = all of it."""
        return ""

    def companion(self, lm: Any) -> Companion | None:
        """Return the companion of a sequence of the model `lm`; None = it needs none. Raises BadModel."""

    def bind(self, store: KVCache, source: PageSource, attention_params: Sequence[AttentionParams | None]) -> KVCache:
        """Return a KV cache of one tier that rows read by these settings; `source`: read access to its single slots."""
        return store

    def bind_tier(self, tier: PageTier, attention_params: Sequence[AttentionParams | None]) -> LowerTier:
        """Return a lower tier of a tiered cache that rows read by these settings."""
        return tier

    def layers(self, attention_params: Sequence[AttentionParams | None]) -> list[int]:
        """Return the layers with sparse attention."""
        return []

    def index_bytes(self, head_dim: int, number: int) -> IndexBytes:
        """Return the bytes of index of one KV head, for the memory plan; `number`: bytes of one key element."""
        return IndexBytes()


@dataclass(frozen=True)
class FullAttention(SparseMethod):
    """Full attention (kvcli's own): rows read the whole KV cache. Not measured here: it is the baseline."""


@dataclass(frozen=True)
class _PageSelection(SparseMethod):
    """Settings of all sparse methods. Sparse attention applies to the only tier, or to all tiers below the first.

    Prompt tokens attend to the whole KV cache.
    """

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

    def index(self) -> PageIndex:
        """Return the page index."""
        raise NotImplementedError

    def allowance(self) -> float | None:
        """Return the softmax mass that a row may miss; None = not bounded."""
        return None

    def _how(self, source: PageSource, attention_params: Sequence[AttentionParams | None]) -> dict[str, Any]:
        from kvcli.kv.sparse.pages import PageBudget

        return {
            "index": self.index(),
            "budget": PageBudget(self.fraction, self.floor, self.sinks, self.recent),
            "layers": self.layers(attention_params),
            "epsilon": self.allowance(),
            "cutoff": self.cutoff,
            "is_shared": self.choice == "interval",
            "source": source,
        }


@dataclass(frozen=True)
class MinMax(_PageSelection):
    """Quest (Tang et al., 2024, arXiv 2406.10774): pages with the highest score bounds, by minimum and maximum of keys.

    The demo finds 0.0833 of the facts in a report, with 3,380 bytes of KV per token (measurements/kv-cache.md).
    """

    page: Annotated[int, Range(1)] = 16  # tokens per page

    def index(self) -> PageIndex:
        from kvcli.kv.sparse import index_minmax

        return index_minmax.MinMax(self.page)

    def _per_slot(self, head_dim: int, number: int) -> float:
        return (2 * head_dim * number + PER_PAGE) / self.page


@dataclass(frozen=True)
class Sketch(_PageSelection):
    """Sketch (kvcli's own): pages with the highest scores, estimated from keys quantized to two bits.

    The demo finds all facts in a report; of 3,413 bytes per token, 166 are the index (measurements/kv-cache.md).
    """

    page: Annotated[int, Range(1)] = 4  # tokens per page

    def index(self) -> PageIndex:
        from kvcli.kv.sparse import index_sketch

        return index_sketch.Sketch(self.page)

    def _per_slot(self, head_dim: int, number: int) -> float:
        return -(-head_dim // 4) + 2 + PER_PAGE / self.page

    def _per_head(self, head_dim: int) -> float:
        return 2 * 4 * head_dim  # means and spreads


@dataclass(frozen=True)
class Certified(_PageSelection):
    """Certified (kvcli's own): pages with the highest int8 score bounds, or all if they may miss more than `epsilon`.

    The demo finds all facts in a report; of 3,811 bytes per token, 564 are the index (measurements/kv-cache.md).
    """

    page: Annotated[int, Range(1)] = 4  # tokens per page
    epsilon: Annotated[float, Range(0, below=1)] = 0.01  # maximum share of attention that a head may miss

    exactness_label: ClassVar[Exactness] = "certified"

    def index(self) -> PageIndex:
        from kvcli.kv.sparse import index_certified

        return index_certified.Certified(self.page)

    def allowance(self) -> float | None:
        return self.epsilon

    def _per_slot(self, head_dim: int, number: int) -> float:
        return head_dim + 4 + PER_PAGE / self.page


@dataclass(frozen=True)
class Cluster(_PageSelection):
    """ClusterKV (Liu et al., 2024, arXiv 2412.03213): whole clusters of keys with similar directions, best mean first.

    If `snap` demotes all but 12.5% of the tokens, the demo's accuracy is 0.672 (measurements/kv-cache.md).
    """

    window: Annotated[int, Range(2, most=32768)] = 512  # tokens clustered at a time; newer ones are read in full
    size: Annotated[int, Range(1)] = 16  # average tokens per cluster

    def __post_init__(self) -> None:
        if self.window % self.size:
            raise ValueError(f"window = {self.window} is no multiple of size = {self.size}")

    def index(self) -> PageIndex:
        from kvcli.kv.sparse import index_cluster

        return index_cluster.Clusters(self.window, self.window // self.size)

    def _per_slot(self, head_dim: int, number: int) -> float:
        return head_dim * number / self.size + 2 + PER_PAGE


@dataclass(frozen=True)
class LowRank(_PageSelection):
    """ShadowKV's index (Sun et al., 2024, arXiv 2410.21465): pages with the highest scores, by low-rank keys.

    If `snap` demotes all but 12.5% of the tokens, the demo's accuracy is 0.995 (measurements/kv-cache.md).
    """

    page: Annotated[int, Range(1)] = 8  # tokens per page
    rank: Annotated[int, Range(1)] = 32  # elements kept per key, at most the head size

    def index(self) -> PageIndex:
        from kvcli.kv.sparse import index_lowrank

        return index_lowrank.LowRank(self.page, self.rank)

    def _per_slot(self, head_dim: int, number: int) -> float:
        return min(self.rank, head_dim) * number + PER_PAGE / self.page

    def _per_head(self, head_dim: int) -> float:
        return 4 * min(self.rank, head_dim) * head_dim  # directions
