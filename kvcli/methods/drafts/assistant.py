"""Drafting with the assistant model that Gemma 4 has in separate files: it reads the KV cache of the target model and
stores none.

Tokens are sampled from the target model and compared with draft tokens afterwards, so the answer is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.kv.footprint import Footprint, ModelSizes
from kvcli.methods.drafts.model_draft_settings import ModelDraftSettings
from kvcli.settings.schema import DraftModelRef, Load, Quant, Range

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvcli.drafts.tree.tree_drafter import TreeDrafter
    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.hf.lm import LM
    from kvcli.models.source import Source


def _load(target: LM, source: Source, wants: Load) -> LM:
    from kvcli.engine.drafting.gemma4_assistant import load_assistant  # late: reading a profile must not import torch

    return load_assistant(target, source, wants)


@dataclass(frozen=True)
class AssistantDraft(ModelDraftSettings):
    """Gemma 4 assistant (kvcli's own): drafts by the model made for this Gemma 4, and copies. Not measured here."""

    model: str = ""  # assistant model: id, folder or name, as after -m
    quant: Quant = "none"  # precision of its weights
    depth: Annotated[int, Range(1, 64)] = 4  # draft tokens in a row, at most

    @property
    def second(self) -> DraftModelRef:
        """Draft model of these settings. Raises BadConfig if none is named."""
        from kvcli.errors import BadConfig

        if not self.model:
            raise BadConfig(
                'spec.method = "assistant" needs the assistant of the target model',
                code="no_draft_model",
                try_=["--draft ASSISTANT", "--set spec.model=ASSISTANT"],
            )
        return DraftModelRef(self.model, self.quant, head="assistant", load=_load)

    def draft_footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the footprint of the assistant, which stores no KV and has no recurrent states."""
        return Footprint(chunk=1, rows=self.branches)

    def drafter(self, ends: Collection[int] = (), pair: ModelPair | None = None) -> TreeDrafter:
        """Return a drafter without a sequence."""
        from kvcli.drafts.draft_models.assistant_head import AssistantHead
        from kvcli.drafts.sources.model_draft import ModelDraft
        from kvcli.drafts.sources.prompt_lookup import PromptLookup

        assert pair is not None, "a drafter needs a model pair"
        lm, head = pair.target, pair.draft
        share = head.info.weight_bytes / lm.info.weight_bytes
        draft_model = AssistantHead(lm, head)
        chain = ModelDraft(
            draft_model, lm, depth=self.depth, share=share, ends=ends, growth=self.growth, name="assistant"
        )
        return self.mixer(chain, PromptLookup(self.min_match, self.max_match))
