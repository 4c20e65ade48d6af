"""The `[sparse]` table of a profile: which slots of the KV cache rows read (sparse attention)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcli.kv.footprint import IndexBytes
from kvcli.settings.schema import Exactness

if TYPE_CHECKING:
    from kvcli.kv.companion import Companion
    from kvcli.kv.slots import AttentionParams, KVCache, LowerTier
    from kvcli.kv.sparse.page_source import PageSource, PageTier


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

    def companion(self, pair: Any) -> Companion | None:
        """Return the companion of a sequence of the `ModelPair`; None = it needs none. Raises BadModel."""

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
