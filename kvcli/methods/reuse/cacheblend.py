"""CacheBlend: what was read behind another text is taken over, and those tokens are read again that differ most.

Yao et al., "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion", EuroSys 2025,
arXiv 2405.16444. The first layer makes the same keys and values behind any text; those of the second show what came out
of the first otherwise. So all tokens go through the first, and those that differ most through the rest, a few fewer in
each, by what differs in the one below ("gradual filtering").

`select = "hidden"` tells them by the hidden states that the first layer gives, as KVShare does (Yang et al., arXiv
2503.16525): the text that they come from goes through that layer once more. KVShare's other half, which reads tokens
again while it answers, is left out: what is stored does not change under an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.span_reuse import ReusableSpans

FEWER = 0.25  # by so much of the share there are more in the second layer, and fewer in the last


@dataclass(frozen=True)
class CacheBlend:
    """Take over what stands in other texts, and read what differs most again (CacheBlend, arXiv 2405.16444)."""

    min_span: Annotated[int, Range(8)] = 64  # tokens in a row that are worth taking over
    recompute: Annotated[float, Range(0, 1)] = 0.15  # share of them read again, mean of the layers above the first
    select: Literal["kv", "hidden"] = "kv"  # by what these are chosen: keys and values, or hidden states (KVShare)

    @property
    def describe_reused(self) -> str:
        again = f"{100 * self.recompute:.3g} % of them read again"
        return f"takes over {self.min_span} tokens or more in a row as they were read behind another text, {again}"

    def check_model(self, lm: LM) -> None:
        """Raises BadModel where no fixed table says how keys turn, or rows cannot be stopped between layers."""
        from kvcli.engine.hf.rope import rotaries
        from kvcli.engine.prefill.layerwise import check_model

        rotaries(lm)
        if self.recompute:
            check_model(lm, None)

    def bind(self, lm: LM) -> ReusableSpans:
        """Runs turned to where they stand, some of their tokens read again."""
        from kvcli.methods.reuse.rerotated_spans import RerotatedSpans
        from kvcli.methods.reuse.selective_recompute import SelectiveRecompute

        return RerotatedSpans(lm, self.min_span, SelectiveRecompute(lm, self) if self.recompute else None)

    def shares(self, n: int) -> list[float]:
        """What goes on into each of n layers above the first (or groups that share slots), as a share of a run."""
        more = 0 if self.select == "hidden" else min(FEWER * self.recompute, 1 - self.recompute)
        return [self.recompute + more * (1 - 2 * i / max(1, n - 1)) for i in range(n)]
