"""Draft with the model itself, over a part of the past (MagicDec, arXiv 2408.11049; TriForce, arXiv 2404.11912), or
over what the store shows to guesses: the coarse half of its codes (QuantSpec, arXiv 2502.10424), or what a profile
keeps where the whole past checks it.

Tokens are drawn over the whole past and compared with guesses afterwards, so the text is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from kvcli.methods.drafts.model_draft_settings import ModelDraftSettings
from kvcli.methods.drafts.view_settings import ViewSettings
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvcli.drafts.draft_models.layer_skip import LayerSkip
    from kvcli.drafts.tree.tree_drafter import TreeDrafter
    from kvcli.engine.drafting.drafter import ModelPair
    from kvcli.engine.hf.lm import LM

_UNTRIED = 0.3  # plain passes that a pass is taken for until two were measured: a low price, so that it is tried


@dataclass(frozen=True)
class SelfDraft(ModelDraftSettings, ViewSettings):
    """Guess with the model itself over less of the past, and copy where the text repeats itself."""

    checks: ClassVar[bool] = True  # under `exactness = "exact"` what `[kv]` and `[policy]` keep guesses, no more

    depth: Annotated[int, Range(1, 64)] = 4  # tokens that it guesses in a row, at most
    skip: Literal["none", "swift", "clasp", "knn", "early"] = "none"  # how layers are chosen that guesses leave out
    skipped: Annotated[float, Range(0, 1)] = 0.45  # how many, as a share of those between the first and the last

    def ignored_keys(self) -> dict[str, str]:
        """Keys that nothing reads as the others are."""
        return super().ignored_keys() | ({"skipped": "skip"} if self.skip == "none" else {})

    def drafter(self, ends: Collection[int] = (), pair: ModelPair | None = None) -> TreeDrafter:
        """A drafter that knows no text yet."""
        from kvcli.drafts.draft_models.same_model import SelfDraftModel
        from kvcli.drafts.sources.model_draft import ModelDraft
        from kvcli.drafts.sources.prompt_lookup import PromptLookup

        assert pair is not None, "somebody must draft"
        lm = pair.target
        lm.mixers.refuse(lm.info.id, "it cannot guess over a part of what it knows", ["--set spec.method=ngram"])
        guesser = SelfDraftModel(lm, self._skipping(lm))
        chain = ModelDraft(guesser, depth=self.depth, vocab=lm.vocab, share=_UNTRIED, ends=ends, name="self")
        return self.mixer(chain, PromptLookup(self.min_match, self.max_match), view=self.glance())

    def _skipping(self, lm: LM) -> LayerSkip:
        from kvcli.drafts.draft_models.layer_skip import AllLayers, Clasp, Early, Knn, SavedLayerSets, Swift

        if self.skip == "none":
            return AllLayers()
        if self.skip == "knn":
            return Knn(lm, self.skipped, lm.remembers.setdefault((SavedLayerSets, self.skipped), SavedLayerSets()))
        kinds: dict[str, Callable[[LM, float], LayerSkip]] = {"swift": Swift, "clasp": Clasp, "early": Early}
        return kinds[self.skip](lm, self.skipped)
