"""Lookahead decoding and FAFO: lookahead rows predict several positions in the same pass, by the target model itself.

Without a cache view this is Lookahead Decoding (Fu et al., arXiv 2402.02057): lookahead rows attend to the whole KV
cache. With a view it is FAFO (Le et al., ICML 2026, PMLR 306): lookahead rows attend to a small part of the KV cache,
which costs less and drafts as well. `docs/design/fafo.md` lists the differences from FAFO's released code and their
reasons; above all, no row attends to an empty slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from kvcli.drafts.draft_settings import clock_of
from kvcli.kv.footprint import Footprint, ModelSizes
from kvcli.methods.drafts.view_settings import ViewSettings
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvcli.drafts.sources.jacobi_window import JacobiWindow
    from kvcli.drafts.sources.ngram_pool import NgramPool
    from kvcli.drafts.tree.tree_drafter import TreeDrafter
    from kvcli.engine.drafting.drafter import ModelPair


@dataclass(frozen=True)
class LookaheadSettings(ViewSettings):
    """Settings of every method with lookahead rows."""

    # two levels of lookahead rows are filled within a pass or two; longer n-grams found less on the demo model
    # (docs/design/fafo.md)
    ngram: Annotated[int, Range(3, 16)] = 3  # tokens of an n-gram, including the token that it follows
    window: Annotated[int, Range(1, 64)] = 4  # columns of the Jacobi window: positions ahead predicted at once
    key_max: Annotated[int, Range(1, 8)] = 4  # tokens by which an n-gram is looked up, at most
    per_key: Annotated[int, Range(1, 64)] = 8  # n-grams stored per key
    seeded: bool = False  # add the n-grams of prompt and answer to the pool
    guesses: Annotated[int, Range(1, 64)] = 8  # n-grams verified per pass

    @property
    def rows(self) -> int:
        """Maximum rows of a pass: the pending token, draft tokens and lookahead rows."""
        return self.max + self.window * (self.ngram - 1)

    def footprint(self, n: int, of: ModelSizes) -> Footprint:
        """Return the maximum bytes of the n-gram pool after n tokens."""
        from kvcli.drafts.sources.ngram_pool import KEY_BYTES, KEYS

        return Footprint(host=KEY_BYTES * min(KEYS, n * (self.window * self.key_max + self.seeded)))

    def window_and_pool(self, ends: Collection[int]) -> tuple[JacobiWindow, NgramPool]:
        """Return the Jacobi window and the n-gram pool that it fills."""
        from kvcli.drafts.sources.jacobi_window import JacobiWindow
        from kvcli.drafts.sources.ngram_pool import NgramPool

        seeds = self.ngram if self.seeded else 0
        return JacobiWindow(self.window, self.ngram, ends), NgramPool(self.key_max, self.per_key, self.guesses, seeds)


@dataclass(frozen=True)
class Lookahead(LookaheadSettings):
    """Lookahead decoding (Fu et al., 2024, arXiv 2402.02057), with a view FAFO (Le et al., 2026): drafts by extra rows.

    Decoding is 0.936 times as fast for greedy copies, and 1.3 times for random text (measurements/lab-log.md).
    """

    def drafter(self, ends: Collection[int] = (), pair: ModelPair | None = None) -> TreeDrafter:
        """Return a drafter without a sequence."""
        from kvcli.drafts.tree.tree_drafter import TreeDrafter

        window, pool = self.window_and_pool(ends)
        return TreeDrafter(self, [pool], clock=clock_of(pair), lookahead=(window, pool), view=self.glance())
