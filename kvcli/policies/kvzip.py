"""Keep what the model needs to repeat the text: KVzip (Kim et al., arXiv 2505.23416).

When a prompt has been read, it is run once more behind itself, piece by piece, and the most that any query of a piece
looks at a slot of that piece is the slot's score. No question is asked, so the text that is left serves any; reading
takes about twice as long. Of each piece only the stored slots that it repeats count, beside the sinks and the piece
itself, as in the paper. The paper asks for the repetition in words; here a piece begins with the tokens before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.policies.topk import Share, TopK
from kvcli.schema import Range

if TYPE_CHECKING:
    from kvcli.policies.scorers import Scorer


@dataclass(frozen=True)
class KVzip(TopK):
    """Keep what the model needs to repeat the text (KVzip): reads every prompt twice, suits any later question."""

    alloc: Share = "global"  # who shares: heads equally, heads of a layer, layers by height, heads by a file, all heads
    floor: Annotated[float, Range(0, 1)] = 0.0  # share of the average that ada, headmap and global leave every head
    piece: Annotated[int, Range(1)] = 512  # tokens repeated in one pass
    lead: Annotated[int, Range(0)] = 8  # tokens before a piece that it begins with

    name: ClassVar[str] = "kvzip"
    by: ClassVar[str] = "what repeating it looks at"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_chunk:
            raise ValueError("per_chunk = true cannot be kept: a text is repeated when all of it has been read")
        if self.keep_new:
            raise ValueError(f"keep_new = {self.keep_new} cannot be kept: what was generated is never repeated")

    def again(self, n: int) -> int:
        """All of it, piece by piece, and the tokens that each piece but the first begins with."""
        return n + (-(-n // self.piece) - 1) * self.lead if n else 0

    def scorer(self) -> Scorer:
        """Scores by what repeating the text looked at."""
        from kvcli.policies.kvzip_scorer import Repeated

        return Repeated(self.piece, self.lead, self.sinks)
