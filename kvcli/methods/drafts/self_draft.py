"""Self-drafting over a cache view (MagicDec, arXiv 2408.11049; TriForce, arXiv 2404.11912), over the upper half of
quantized codes (QuantSpec, arXiv 2502.10424), or over a compressed cache that the full cache verifies.

Tokens are sampled over the full KV cache and compared with draft tokens afterwards, so the answer is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from kvcli.kv.footprint import Footprint, ModelSizes
from kvcli.methods.drafts.model_draft_settings import ModelDraftSettings
from kvcli.methods.drafts.view_settings import ViewSettings
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvcli.drafts.draft_models.layer_skip import LayerSkip
    from kvcli.drafts.tree.tree_drafter import TreeDrafter
    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.hf.lm import LM

_UNTRIED = 0.3  # draft pass time in plain passes until two were measured: a low value, so that self-drafting is tried


@dataclass(frozen=True)
class SelfDraft(ModelDraftSettings, ViewSettings):
    """Self-drafting (MagicDec, 2024, arXiv 2408.11049): drafts by a part of the KV cache or of the layers.

    The demo model answers lookups 0.709 times as fast; 0.857 of draft tokens are accepted (measurements/lab-log.md).
    """

    # under `exactness = "exact"` the cache compressed by `[kv]` and `[policy]` only drafts
    checks: ClassVar[bool] = True

    depth: Annotated[int, Range(1, 64)] = 4  # draft tokens in a row, at most
    skip: Literal["none", "swift", "clasp", "knn", "early"] = "none"  # how to choose the layers that drafting skips
    skipped: Annotated[float, Range(0, 1)] = 0.45  # share of layers skipped, of those between the first and the last

    def ignored_keys(self) -> dict[str, str]:
        """Return the keys that have no effect: key -> the key that disables it."""
        return super().ignored_keys() | ({"skipped": "skip"} if self.skip == "none" else {})

    def footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the memory of the sources, and of draft tokens, whose passes of one row are captured."""
        from kvcli.kv.tiers.draft_buffers import ROOM

        return super().footprint(n, of) + Footprint(beside=ROOM * of.token, captured=(1,))

    def drafter(self, ends: Collection[int] = (), pair: ModelPair | None = None) -> TreeDrafter:
        """Return a drafter without a sequence."""
        from kvcli.drafts.draft_models.same_model import SelfDraftModel
        from kvcli.drafts.sources.model_draft import ModelDraft
        from kvcli.drafts.sources.prompt_lookup import PromptLookup

        assert pair is not None, "a drafter needs a model pair"
        lm = pair.target
        lm.recurrent_layers.refuse(
            lm.info.id, "it cannot draft over a part of its KV cache", ["--set spec.method=ngram"]
        )
        draft_model = SelfDraftModel(lm, self._skipping(lm))
        chain = ModelDraft(
            draft_model, lm, depth=self.depth, share=_UNTRIED, ends=ends, growth=self.growth, name="self"
        )
        return self.mixer(chain, PromptLookup(self.min_match, self.max_match), view=self.glance())

    def _skipping(self, lm: LM) -> LayerSkip:
        from kvcli.drafts.draft_models.layer_skip import Clasp, Early, Knn, LayerSkip, SavedLayerSets, Swift

        if self.skip == "none":
            return LayerSkip()
        if self.skip == "knn":
            return Knn(lm, self.skipped, lm.remembers.setdefault((SavedLayerSets, self.skipped), SavedLayerSets()))
        kinds: dict[str, Callable[[LM, float], LayerSkip]] = {"swift": Swift, "clasp": Clasp, "early": Early}
        return kinds[self.skip](lm, self.skipped)
