"""Drafting with the multi-token prediction layers in the model's own files (MTP, DeepSeek-V3, arXiv 2412.19437), which
read hidden states of the target model.

Tokens are sampled from the target model and compared with draft tokens afterwards, so the answer is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.kv.footprint import Footprint, ModelSizes
from kvcli.methods.drafts.model_draft_settings import ModelDraftSettings
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvcli.drafts.tree.tree_drafter import TreeDrafter
    from kvcli.engine.drafting.drafter import ModelPair


@dataclass(frozen=True)
class MtpDraft(ModelDraftSettings):
    """MTP (DeepSeek-V3, 2024, arXiv 2412.19437): drafts by multi-token prediction and copies. Not measured here."""

    depth: Annotated[int, Range(1, 64)] = 3  # draft tokens in a row, at most

    def footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the memory of the sources, and of the MTP layer's KV of all tokens, which is like the last layer's."""
        from kvcli.kv.tiers.dense import Dense
        from kvcli.kv.tiers.draft_buffers import ROOM

        return super().footprint(n, of) + Footprint(beside=(-(-n // Dense.STEP) * Dense.STEP + ROOM) * of.last_slot)

    def drafter(self, ends: Collection[int] = (), pair: ModelPair | None = None) -> TreeDrafter:
        """Return a drafter without a sequence. Raises BadModel if the model's files have no usable MTP layer."""
        from kvcli.drafts.draft_models.mtp_head import MtpHead
        from kvcli.drafts.sources.model_draft import ModelDraft
        from kvcli.drafts.sources.prompt_lookup import PromptLookup
        from kvcli.engine.drafting.mtp import mtp_of

        assert pair is not None, "a drafter needs a model pair"
        lm = pair.target
        head = mtp_of(lm)
        share = 1 / lm.n_layers  # time of a pass in plain passes, until measured
        chain = ModelDraft(
            MtpHead(lm, head), lm, depth=self.depth, share=share, ends=ends, growth=self.growth, name="mtp"
        )
        return self.mixer(chain, PromptLookup(self.min_match, self.max_match))
