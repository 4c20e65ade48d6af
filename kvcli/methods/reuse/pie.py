"""PIE: behind an edit, keys are turned to their new positions and values stay, so that the edit alone is read.

He et al., "Let the Code LLM Edit Itself When You Edit the Code" (Positional Integrity Encoding), arXiv 2407.03157.
What is taken over was read behind the old text and does not know of the new one: an approximation, good where an edit
changes little of what follows. Runs are found wherever they lie in the old text, so that a document taken out and a
conversation that lost its beginning cost no reading either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.prefill.span_reuse import ReusableSpans


@dataclass(frozen=True)
class Pie:
    """Take over what two texts share behind an edit, keys turned to their new positions (PIE, arXiv 2407.03157)."""

    min_span: Annotated[int, Range(8)] = 64  # tokens in a row that are worth taking over

    @property
    def describe_reused(self) -> str:
        return f"takes over {self.min_span} tokens or more in a row as they were read behind another text"

    def check_model(self, lm: LM) -> None:
        """Raises BadModel where no fixed table says how keys turn."""
        from kvcli.engine.hf.rope import rotaries

        rotaries(lm)

    def bind(self, lm: LM) -> ReusableSpans:
        """Runs as they were read, turned."""
        from kvcli.methods.reuse.rerotated_spans import RerotatedSpans

        return RerotatedSpans(lm, self.min_span)
