"""CacheBlend: reuse KV computed after another prefix, and recompute the tokens whose KV differs most.

Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion", EuroSys 2025,
arXiv 2405.16444. Keys and values of the first layer do not depend on the prefix; those of the second show how the
first layer's output differs. So all tokens run through the first layer, and those that differ most through the others,
slightly fewer in each, selected by the difference in the layer below ("gradual filtering").

`select = "hidden"` selects by the hidden states after the first layer, as in KVShare (Yang et al., arXiv 2503.16525);
the source sequence is run through that layer once more for this. KVShare's other half, recomputing tokens during the
answer, is not implemented, because the stored KV must not change during an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from kvcli.methods.reuse.pie import Pie
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.methods.reuse.span_reuse import SpanReuse

FEWER = 0.25  # the second layer recomputes this share of `recompute` more tokens, the last this share fewer


@dataclass(frozen=True)
class CacheBlend(Pie):
    """CacheBlend (Yao et al., 2024, arXiv 2405.16444): reuses matching text, recomputes the tokens that differ most.

    If halves are swapped, prefill is 1.17 times as fast, the next token 0.0155 nats off (measurements/lab-log.md).
    """

    recompute: Annotated[float, Range(0, 1)] = 0.15  # share of a span recomputed, mean over layers above the first
    select: Literal["kv", "hidden"] = "kv"  # recompute by difference in: KV, or hidden states (KVShare)

    @property
    def describe_reused(self) -> str:
        return f"{super().describe_reused}, {100 * self.recompute:.3g} % of them recomputed"

    def companion(self, pair: ModelPair) -> SpanReuse:
        """Return the companion of a sequence that loads spans, with selective recompute of some of their tokens."""
        from kvcli.methods.reuse.selective_recompute import SelectiveRecompute
        from kvcli.methods.reuse.span_reuse import SpanReuse

        lm = pair.target
        if not self.recompute:
            return SpanReuse(lm, self.min_span)
        by_hidden, chooses = self.select == "hidden", self.recompute < 1
        return SpanReuse(lm, self.min_span, partial(SelectiveRecompute, lm, self.shares, by_hidden, chooses))

    def shares(self, n: int) -> list[float]:
        """Return the share of a span that is recomputed in each of n layers (or layers sharing KV) above the first."""
        more = 0 if self.select == "hidden" else min(FEWER * self.recompute, 1 - self.recompute)
        return [self.recompute + more * (1 - 2 * i / max(1, n - 1)) for i in range(n)]
