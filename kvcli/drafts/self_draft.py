"""Draft with the model itself, over a part of the past (MagicDec, arXiv 2408.11049; TriForce, arXiv 2404.11912), or
over what the store shows to guesses: the coarse half of its codes (QuantSpec, arXiv 2502.10424), or what a profile
keeps where the whole past checks it.

Tokens are drawn over the whole past and compared with guesses afterwards, so the text is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from kvcli.drafts.company import Company
from kvcli.drafts.viewing import Viewing
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvcli.drafts.mixer import Mixer
    from kvcli.drafts.skipping import Skipping
    from kvcli.engine.drafter import Pair

_UNTRIED = 0.3  # plain passes that a pass is taken for until two were measured: a low price, so that it is tried


@dataclass(frozen=True)
class SelfDraft(Company, Viewing):
    """Guess with the model itself over less of the past, and copy where the text repeats itself."""

    checks: ClassVar[bool] = True  # under `exactness = "exact"` what `[kv]` and `[policy]` keep guesses, no more

    depth: Annotated[int, Range(1, 64)] = 4  # tokens that it guesses in a row, at most
    skip: Literal["none", "swift", "clasp"] = "none"  # how layers are chosen that guesses do not go through
    skipped: Annotated[float, Range(0, 1)] = 0.45  # of the layers between the first and the last, those left out

    def drafter(self, ends: Collection[int] = (), pair: Pair | None = None) -> Mixer:
        """A drafter that knows no text yet."""
        from kvcli.drafts.chain import Chain
        from kvcli.drafts.copies import Copies
        from kvcli.drafts.itself import Itself
        from kvcli.drafts.skipping import Clasp, Nothing, Swift

        assert pair is not None, "somebody must draft"
        lm = pair.target
        skipping: Skipping = Nothing()
        if self.skip != "none":
            skipping = (Swift if self.skip == "swift" else Clasp)(lm, self.skipped)
        chain = Chain(Itself(lm, skipping), depth=self.depth, vocab=lm.vocab, share=_UNTRIED, ends=ends, name="self")
        return self.mixer(chain, Copies(self.min_match, self.max_match), view=self.glance())
