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
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from kvcli.settings.effects import Needs
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.span_reuse import ReusableSpans

FEWER = 0.25  # the second layer recomputes this share of `recompute` more tokens, the last this share fewer


@dataclass(frozen=True)
class CacheBlend:
    """Reuse matching text of other prompts, recompute the tokens that differ most (CacheBlend, arXiv 2405.16444)."""

    min_span: Annotated[int, Range(8)] = 64  # minimum length of a reused span, in tokens
    recompute: Annotated[float, Range(0, 1)] = 0.15  # share of a span recomputed, mean over layers above the first
    select: Literal["kv", "hidden"] = "kv"  # recompute by difference in: KV, or hidden states (KVShare)

    needs: ClassVar[Needs] = Needs(frozenset({"evicts", "prunes", "selects"}), "the KV of all tokens, read in full")

    @property
    def describe_reused(self) -> str:
        again = f"{100 * self.recompute:.3g} % of them recomputed"
        return f"reuses KV of spans of {self.min_span} tokens or more from other texts, {again}"

    def check_model(self, lm: LM) -> None:
        """Raise BadModel if RoPE is not a fixed table, or if rows cannot be stopped between layers."""
        from kvcli.engine.hf.rope import rotaries
        from kvcli.engine.prefill.layerwise import check_model

        rotaries(lm)
        if self.recompute:
            check_model(lm, None)

    def bind(self, lm: LM) -> ReusableSpans:
        """Return the re-rotated spans, with selective recompute of some of their tokens."""
        from kvcli.methods.reuse.rerotated_spans import RerotatedSpans
        from kvcli.methods.reuse.selective_recompute import SelectiveRecompute

        return RerotatedSpans(lm, self.min_span, SelectiveRecompute(lm, self) if self.recompute else None)

    def shares(self, n: int) -> list[float]:
        """Return the share of a span that is recomputed in each of n layers (or layers sharing KV) above the first."""
        more = 0 if self.select == "hidden" else min(FEWER * self.recompute, 1 - self.recompute)
        return [self.recompute + more * (1 - 2 * i / max(1, n - 1)) for i in range(n)]
