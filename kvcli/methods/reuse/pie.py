"""PIE: after an edit, keys are rotated to their new positions and values are unchanged, so only the edit is prefilled.

He et al., "Let the Code LLM Edit Itself When You Edit the Code" (Positional Integrity Encoding), arXiv 2407.03157.
The reused KV was computed after the old text and does not depend on the new one. This is an approximation, good where
an edit changes little of the following text. Spans are found anywhere in the old text, so that removing a document or
the beginning of a chat needs no prefill either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.settings.profile import Needs
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.methods.reuse.span_reuse import SpanReuse


@dataclass(frozen=True)
class Pie:
    """PIE (He et al., 2024, arXiv 2407.03157): reuses unchanged text after an edit, with keys rotated to new positions.

    If halves are swapped, prefill is 4.74 times as fast, the next token 0.267 nats off (measurements/lab-log.md).
    """

    min_span: Annotated[int, Range(8)] = 64  # minimum length of a reused span, in tokens

    needs: ClassVar[Needs] = Needs(frozenset({"evicts", "prunes", "selects"}), "the KV of all tokens, read in full")

    @property
    def describe_reused(self) -> str:
        return f"reuses KV of spans of {self.min_span} tokens or more from other texts"

    def companion(self, pair: ModelPair) -> SpanReuse:
        """Return the companion of a sequence that loads spans, without recompute."""
        from kvcli.methods.reuse.span_reuse import SpanReuse

        return SpanReuse(pair.target, self.min_span)
