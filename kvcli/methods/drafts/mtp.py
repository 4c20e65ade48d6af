"""Draft with the layers for it that come in the model's own files (multi-token prediction, DeepSeek-V3, arXiv
2412.19437): they read the hidden states of the model that writes.

Tokens are drawn from the model itself and compared with guesses afterwards, so the text is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.methods.drafts.model_draft_settings import ModelDraftSettings
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvcli.drafts.tree.tree_drafter import TreeDrafter
    from kvcli.engine.drafting.drafter import ModelPair


@dataclass(frozen=True)
class MtpDraft(ModelDraftSettings):
    """Guess with the model's own MTP layer, and copy where the text repeats itself."""

    depth: Annotated[int, Range(1, 64)] = 3  # tokens that it guesses in a row, at most

    def draft_slots(self, n: int, device: str = "cpu") -> int:
        """Of n tokens, those whose keys and values its layer has: all that it hears of, at most."""
        return n

    def drafter(self, ends: Collection[int] = (), pair: ModelPair | None = None) -> TreeDrafter:
        """A drafter that knows no text yet. Raises BadModel where the model's files have no such layer to use."""
        from kvcli.drafts.draft_models.mtp_head import MtpHead
        from kvcli.drafts.sources.model_draft import ModelDraft
        from kvcli.drafts.sources.prompt_lookup import PromptLookup
        from kvcli.engine.drafting.mtp import mtp_of

        assert pair is not None, "somebody must draft"
        lm = pair.target
        head = mtp_of(lm)
        share = 1 / lm.n_layers  # of a pass, until it is measured
        chain = ModelDraft(MtpHead(lm, head), depth=self.depth, vocab=lm.vocab, share=share, ends=ends, name="mtp")
        return self.mixer(chain, PromptLookup(self.min_match, self.max_match))
