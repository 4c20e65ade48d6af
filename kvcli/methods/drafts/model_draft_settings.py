"""Draft sources that are combined with a draft model: prompt lookup and recycled logits.

All sources share one draft tree. A token that several sources propose is one row. Where the draft model's tokens end,
the other sources continue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvcli.drafts.tree.growth import Growth
from kvcli.kv.footprint import Footprint, ModelSizes
from kvcli.methods.drafts.ngram import Ngram

if TYPE_CHECKING:
    from kvcli.drafts.sources.logit_recycling import RecycledLogits
    from kvcli.drafts.sources.model_draft import ModelDraft
    from kvcli.drafts.sources.prompt_lookup import PromptLookup
    from kvcli.drafts.tree.tree_drafter import TreeDrafter


@dataclass(frozen=True)
class ModelDraftSettings(Ngram):
    """Settings of every method with draft passes of a model."""

    copies: bool = True  # also draft by prompt lookup; the model does not run if a copy is almost certain
    sources: tuple[Literal["stand", "token-recycling"], ...] = ()  # further sources in the same draft tree, as in "mix"
    overlap: bool = False  # draft during verification (PEARL); true is refused, because models take turns

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap:  # PEARL, arXiv 2408.11850; SpecBranch, arXiv 2506.01979
            raise ValueError(
                "overlap = true would draft during verification, but kvcli runs the models one after the other: set "
                "overlap = false; draft sources that need no pass of their own are copies = true and "
                'sources = ["stand", "token-recycling"]'
            )

    def ignored_keys(self) -> dict[str, str]:
        """Return the keys that have no effect: key -> the key that disables it. Adds keys of unused prompt lookup."""
        return super().ignored_keys() | ({} if self.copies else dict.fromkeys(("min_match", "max_match"), "copies"))

    def footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the maximum bytes that the sources hold for n tokens."""
        from kvcli.drafts.sources.logit_recycling import learned_bytes

        learned = Footprint(host=learned_bytes(self.sources, n))
        return super().footprint(n, of) + learned if self.copies else learned

    @property
    def growth(self) -> Growth:
        """Growth rule of the draft tree."""
        return Growth(branches=self.branches, nodes=self.max)

    def mixer(self, chain: ModelDraft, copies: PromptLookup, **of: Any) -> TreeDrafter:
        """Return the drafter of a draft model and the other sources. `of`: as in `TreeDrafter`."""
        from kvcli.drafts.sources.logit_recycling import learners
        from kvcli.drafts.tree.tree_drafter import TreeDrafter

        successors, chain.is_fixed = learners(self.sources), not self.adaptive
        # the cheapest first
        others: list[PromptLookup | RecycledLogits] = [*([copies] if self.copies else []), *successors]
        chain.is_alone = not others
        beyond = [(i, source.behind) for i, source in enumerate(others)]
        return TreeDrafter(
            self, [*others, chain], clock=chain.clock, successors=successors, chain=chain, beyond=beyond, **of
        )
