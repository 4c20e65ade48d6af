"""Several draft sources in one tree: prompt lookup, lookahead rows and recycled logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from kvcli.drafts.draft_settings import DraftSettings, clock_of
from kvcli.kv.footprint import Footprint, ModelSizes
from kvcli.methods.drafts.lookahead import LookaheadSettings
from kvcli.settings.schema import Range
from kvcli.settings.values import keys_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvcli.drafts.tree.tree import DraftSource
    from kvcli.drafts.tree.tree_drafter import TreeDrafter
    from kvcli.engine.drafting.drafter import ModelPair


Sources = tuple[Literal["prompt-lookup", "lookahead", "stand", "token-recycling"], ...]


@dataclass(frozen=True)
class Mix(LookaheadSettings):
    """Mixed drafts (kvcli's own): draft tokens of several sources, merged into one draft tree.

    The widened demo answers lookups 1.83 times as fast; 0.741 of draft tokens are accepted (measurements/drafters.md).
    """

    # lookahead last, because only tokens that no earlier source proposed count as its gain
    sources: Sources = ("prompt-lookup", "stand", "token-recycling", "lookahead")  # sources of draft tokens, in order
    min_match: Annotated[int, Range(1, 64)] = 1  # of "prompt-lookup": tokens that must match before a copy
    max_match: Annotated[int, Range(1, 256)] = 32  # of "prompt-lookup": longer matches count as this long

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_match < self.min_match:
            raise ValueError(f"max_match = {self.max_match} is less than min_match = {self.min_match}")
        if not self.sources:
            raise ValueError('sources = [] names no draft source; to disable drafting: method = "off"')

    def ignored_keys(self) -> dict[str, str]:
        """Return the keys that have no effect: key -> the key that disables it. Adds keys of sources not in use."""
        lookahead_keys = [key for key in keys_of(LookaheadSettings) if key not in keys_of(DraftSettings)]
        needs = {"prompt-lookup": ["min_match", "max_match"], "lookahead": lookahead_keys}
        keys = [key for source, keys in needs.items() if source not in self.sources for key in keys]
        return super().ignored_keys() | dict.fromkeys(keys, "sources")

    @property
    def rows(self) -> int:
        """Maximum rows of a pass; lookahead rows only if they are among the sources."""
        return super().rows if "lookahead" in self.sources else 1 + self.max

    def view_slots(self, n: int) -> int:
        """Return how many of n slots per head the cache view copies: 0 without lookahead."""
        return super().view_slots(n) if "lookahead" in self.sources else 0

    def footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the maximum bytes that the sources hold for n tokens."""
        from kvcli.drafts.sources.logit_recycling import LENGTHS, learned_bytes
        from kvcli.drafts.sources.prompt_lookup import TOKEN_BYTES

        each = {"prompt-lookup": TOKEN_BYTES * n, "lookahead": super().footprint(n, of).host}
        each |= {name: learned_bytes([name], n) for name in LENGTHS}
        return Footprint(host=sum(each[name] for name in set(self.sources)))

    def drafter(self, ends: Collection[int] = (), pair: ModelPair | None = None) -> TreeDrafter:
        """Return a drafter without a sequence."""
        from kvcli.drafts.sources.logit_recycling import LENGTHS, learners
        from kvcli.drafts.sources.prompt_lookup import PromptLookup
        from kvcli.drafts.tree.tree_drafter import TreeDrafter

        lookahead = self.window_and_pool(ends)
        successors = learners([name for name in self.sources if name in LENGTHS])
        known: dict[str, DraftSource] = {
            "prompt-lookup": PromptLookup(self.min_match, self.max_match),
            "lookahead": lookahead[1],
        }
        known |= {source.name: source for source in successors}
        return TreeDrafter(
            self,
            [known[name] for name in dict.fromkeys(self.sources)],
            clock=clock_of(pair),
            successors=successors,
            lookahead=lookahead if "lookahead" in self.sources else None,
            view=self.glance() if "lookahead" in self.sources else None,
        )
