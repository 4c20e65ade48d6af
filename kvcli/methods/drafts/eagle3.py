"""Drafting with an EAGLE-3 head: a small model in files of its own, trained for one target model, that reads hidden
states of three of its layers (eagle3_head.py).

Tokens are sampled from the target model and compared with draft tokens afterwards, so the answer is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.kv.footprint import Footprint, ModelSizes
from kvcli.methods.drafts.model_draft_settings import ModelDraftSettings
from kvcli.settings.schema import DraftModelRef, Load, Range

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvcli.drafts.tree.tree_drafter import TreeDrafter
    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.hf.lm import LM
    from kvcli.models.source import Source


def _load(target: LM, source: Source, wants: Load) -> LM:
    from kvcli.methods.drafts.eagle3_head import load  # late: reading a profile must not import torch

    return load(target, source, wants)


@dataclass(frozen=True)
class Eagle3Draft(ModelDraftSettings):
    """EAGLE-3 (Li et al., 2025, arXiv 2503.01840): drafts by a head trained for the model.

    SmolLM2's head, always drafting: 1.21 to 1.51 tokens a pass, 0.40 to 0.71 times plain (measurements/lab-log.md).
    """

    model: str = ""  # EAGLE-3 head: id or folder
    depth: Annotated[int, Range(1, 64)] = 4  # draft tokens in a row, at most

    @property
    def second(self) -> DraftModelRef:
        """Draft head of these settings. Raises BadConfig if none is named."""
        from kvcli.errors import BadConfig

        if not self.model:
            raise BadConfig(
                'spec.method = "eagle3" needs a head that was trained for the target model',
                code="no_draft_model",
                try_=["--draft HEAD", "--set spec.model=HEAD"],
            )
        return DraftModelRef(self.model, "none", head="eagle3", load=_load)

    def draft_footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the footprint of the head: KV of all tokens in its one layer, and buffers of draft tokens."""
        from kvcli.drafts.draft_models.mtp_head import MOST
        from kvcli.kv.tiers.dense import Dense
        from kvcli.kv.tiers.draft_buffers import ROOM

        kv = (-(-n // Dense.STEP) * Dense.STEP + ROOM) * of.last_slot
        return Footprint(beside=kv + MOST * 3 * of.hidden * of.number, chunk=MOST, rows=self.branches)

    def drafter(self, ends: Collection[int] = (), pair: ModelPair | None = None) -> TreeDrafter:
        """Return a drafter without a sequence."""
        from kvcli.drafts.sources.model_draft import ModelDraft
        from kvcli.drafts.sources.prompt_lookup import PromptLookup
        from kvcli.methods.drafts.eagle3_head import Eagle3Head

        assert pair is not None, "a drafter needs a model pair"
        lm, head = pair.target, pair.draft
        share = head.info.weight_bytes / lm.info.weight_bytes
        chain = ModelDraft(
            Eagle3Head(lm, head), lm, depth=self.depth, share=share, ends=ends, growth=self.growth, name="eagle3"
        )
        return self.mixer(chain, PromptLookup(self.min_match, self.max_match))
