"""The `[sparse]` table of a profile: which part of what is stored the rows of an answer read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from kvcli.settings.schema import Exactness, Range

if TYPE_CHECKING:
    from kvcli.kv.cache.level import CroppableTier
    from kvcli.kv.slots import AttentionParams, KVCache
    from kvcli.kv.sparse.index import PageIndex
    from kvcli.kv.sparse.page_source import PageSource, PageTier

# bytes of a page, or of each slot where pages are read in part: the first and the last position of it, whether rows may
# choose it, and whether they last did
PER_PAGE = 11


class SparseMethod(Protocol):
    """What a method of the table is. `sights` are those of the layers; None = it reads another's slots."""

    @property
    def exactness_label(self) -> Exactness:
        """The most that `exactness` may say with it."""

    @property
    def selection_interval(self) -> int | None:
        """Tokens between two boundaries while answering; None = it needs none."""

    def bind(self, store: KVCache, source: PageSource, sights: Sequence[AttentionParams | None]) -> KVCache:
        """A store of one tier, read through these settings; `source`: the way to a few of its slots."""

    def bind_tier(self, tier: PageTier, sights: Sequence[AttentionParams | None]) -> CroppableTier:
        """A lower rung of a ladder, read through these settings."""

    @property
    def describe_read(self) -> str:
        """How much of a long text a row reads, in words; "" = all of it."""

    def layers(self, sights: Sequence[AttentionParams | None]) -> list[int]:
        """Those in which rows read a part."""

    def per_slot(self, head_dim: int, number: int) -> float:
        """Bytes of index beside each slot of a KV head whose numbers take so many bytes: for the plan of memory."""

    def per_head(self, head_dim: int) -> float:
        """Bytes of index beside a KV head, whatever it holds."""

    def page_cache_bytes(self, head_dim: int, number: int) -> float:
        """Bytes kept where rows are computed, beside each slot of a KV head that lies far from there."""


@dataclass(frozen=True)
class FullAttention:
    """Read all that is stored."""

    exactness_label: ClassVar[Exactness] = "exact"
    selection_interval: ClassVar[None] = None
    describe_read: ClassVar[str] = ""

    def bind(self, store: KVCache, source: PageSource, sights: Sequence[AttentionParams | None]) -> KVCache:
        return store

    def bind_tier(self, tier: PageTier, sights: Sequence[AttentionParams | None]) -> CroppableTier:
        return tier

    def layers(self, sights: Sequence[AttentionParams | None]) -> list[int]:
        return []

    def per_slot(self, head_dim: int, number: int) -> float:
        return 0.0

    def per_head(self, head_dim: int) -> float:
        return 0.0

    def page_cache_bytes(self, head_dim: int, number: int) -> float:
        return 0.0


@dataclass(frozen=True)
class _PageSelection:
    """Keys of all methods that read a part: of one tier where there is one, else of all below the top.

    The rows of a prompt leave nothing out.
    """

    fraction: Annotated[float, Range(above=0, most=1)] = 0.03  # of the stored tokens that a KV head reads for a row
    floor: Annotated[int, Range(1)] = 1024  # tokens it reads at least; a tier that holds no more is read in full
    sinks: Annotated[int, Range(0)] = 16  # first tokens, always read
    recent: Annotated[int, Range(0)] = 64  # newest tokens, always read; so are those since the last boundary
    dense_layers: Annotated[int, Range(0)] = 2  # first layers, which read everything: their attention is spread widely
    selection_interval: Annotated[int, Range(1)] = 64  # tokens between two boundaries while answering
    choice: Literal["row", "interval"] = "row"  # each row has one of its own, or reads as the first behind the boundary
    cutoff: Annotated[float, Range(0, below=1)] = 0.0  # share of a row's mass; what seems to hold less is not read

    exactness_label: ClassVar[Exactness] = "approx"

    @property
    def describe_read(self) -> str:
        return f"{self.fraction:.0%} of the text for each token, at least {self.floor:,} tokens"

    def bind(self, store: KVCache, source: PageSource, sights: Sequence[AttentionParams | None]) -> KVCache:
        from kvcli.kv.sparse.sparse_cache import SparseCache

        return SparseCache(store, **self._how(source, sights))

    def bind_tier(self, tier: PageTier, sights: Sequence[AttentionParams | None]) -> CroppableTier:
        from kvcli.kv.sparse.sparse_tier import SparseTier

        return SparseTier(tier, **self._how(tier, sights))

    def layers(self, sights: Sequence[AttentionParams | None]) -> list[int]:
        return [i for i, sight in enumerate(sights) if i >= self.dense_layers and sight and sight.window is None]

    def per_head(self, head_dim: int) -> float:
        return 16.0  # how many pages it has, and slots

    def page_cache_bytes(self, head_dim: int, number: int) -> float:
        return 1.25 * self.fraction * 2 * head_dim * number  # with what is fetched ahead, as recall.AHEAD says

    def index(self) -> PageIndex:
        """How pages are known."""
        raise NotImplementedError

    def allowance(self) -> float | None:
        """Softmax mass that a row may miss; None = nobody counts."""
        return None

    def _how(self, source: PageSource, sights: Sequence[AttentionParams | None]) -> dict[str, Any]:
        from kvcli.kv.sparse.pages import PageBudget

        return {
            "index": self.index(),
            "budget": PageBudget(self.fraction, self.floor, self.sinks, self.recent),
            "layers": self.layers(sights),
            "epsilon": self.allowance(),
            "cutoff": self.cutoff,
            "is_shared": self.choice == "interval",
            "source": source,
        }


@dataclass(frozen=True)
class MinMax(_PageSelection):
    """Read the pages with the highest bounds, from each channel's minimum and maximum (Quest)."""

    page: Annotated[int, Range(1)] = 16  # tokens of a page

    def index(self) -> PageIndex:
        from kvcli.kv.sparse import index_minmax

        return index_minmax.MinMax(self.page)

    def per_slot(self, head_dim: int, number: int) -> float:
        return (2 * head_dim * number + PER_PAGE) / self.page


@dataclass(frozen=True)
class Sketch(_PageSelection):
    """Read the pages whose keys, remembered in two bits a number, score highest."""

    page: Annotated[int, Range(1)] = 4  # tokens of a page

    def index(self) -> PageIndex:
        from kvcli.kv.sparse import index_sketch

        return index_sketch.Sketch(self.page)

    def per_slot(self, head_dim: int, number: int) -> float:
        return -(-head_dim // 4) + 2 + PER_PAGE / self.page

    def per_head(self, head_dim: int) -> float:
        return super().per_head(head_dim) + 2 * 4 * head_dim  # means and spreads


@dataclass(frozen=True)
class Certified(_PageSelection):
    """Read what int8 keys say is wanted, and everything where they cannot exclude that more was missed."""

    page: Annotated[int, Range(1)] = 4  # tokens of a page
    epsilon: Annotated[float, Range(0, below=1)] = 0.01  # softmax mass that a row may miss in a head, of what is stored

    exactness_label: ClassVar[Exactness] = "certified"

    def index(self) -> PageIndex:
        from kvcli.kv.sparse import index_certified

        return index_certified.Certified(self.page)

    def allowance(self) -> float | None:
        return self.epsilon

    def per_slot(self, head_dim: int, number: int) -> float:
        return head_dim + 4 + PER_PAGE / self.page


@dataclass(frozen=True)
class Cluster(_PageSelection):
    """Read whole clusters of keys that point alike, the best means first (ClusterKV)."""

    window: Annotated[int, Range(2, most=32768)] = 512  # tokens that are clustered together; the last of them are read
    size: Annotated[int, Range(1)] = 16  # tokens of a cluster, on average

    def __post_init__(self) -> None:
        if self.window % self.size:
            raise ValueError(f"window = {self.window} is no multiple of size = {self.size}")

    def index(self) -> PageIndex:
        from kvcli.kv.sparse import index_cluster

        return index_cluster.Clusters(self.window, self.window // self.size)

    def per_slot(self, head_dim: int, number: int) -> float:
        return head_dim * number / self.size + 2 + PER_PAGE


@dataclass(frozen=True)
class LowRank(_PageSelection):
    """Read the pages whose keys, known along a few directions, score highest (the index of ShadowKV)."""

    page: Annotated[int, Range(1)] = 8  # tokens of a page
    rank: Annotated[int, Range(1)] = 32  # numbers of a key that are kept; at most all of them

    def index(self) -> PageIndex:
        from kvcli.kv.sparse import index_lowrank

        return index_lowrank.LowRank(self.page, self.rank)

    def per_slot(self, head_dim: int, number: int) -> float:
        return min(self.rank, head_dim) * number + PER_PAGE / self.page

    def per_head(self, head_dim: int) -> float:
        return super().per_head(head_dim) + 4 * min(self.rank, head_dim) * head_dim  # directions
