"""Lookahead decoding, and FAFO: scouts guess several places ahead, in the same pass, with the model itself.

Without a view this is Lookahead Decoding (Fu et al., arXiv 2402.02057): scouts read all of the past. With one it is
FAFO (Le et al., ICML 2026, PMLR 306): scouts read a small part of it, which costs less and guesses as well. What
differs from FAFO's released code, and why, is in `docs/fafo.md`; above all, no row sees a slot that holds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

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
    """Keys of every method that sends scouts."""

    # two levels of scouts come about in a pass or two; on the demo model longer n-grams found less (docs/fafo.md)
    ngram: Annotated[int, Range(3, 16)] = 3  # tokens of an n-gram, the one it follows included
    window: Annotated[int, Range(1, 64)] = 4  # columns: places ahead that are guessed at once
    key_max: Annotated[int, Range(1, 8)] = 4  # tokens by which an n-gram is found, at most
    per_key: Annotated[int, Range(1, 64)] = 8  # n-grams kept for a key
    seeded: bool = False  # the text's own n-grams go into the pool as well
    guesses: Annotated[int, Range(1, 64)] = 8  # n-grams tried in a pass

    @property
    def rows(self) -> int:
        """Of a pass, at most: the pending token, guesses and scouts."""
        return self.max + self.window * (self.ngram - 1)

    def index_bytes(self, n: int) -> int:
        """Bytes of the pool, at most, after n tokens."""
        from kvcli.drafts.sources.ngram_pool import KEY_BYTES, KEYS

        return KEY_BYTES * min(KEYS, n * (self.window * self.key_max + self.seeded))

    def scouting(self, ends: Collection[int]) -> tuple[JacobiWindow, NgramPool]:
        """The window and the pool it fills."""
        from kvcli.drafts.sources.jacobi_window import JacobiWindow
        from kvcli.drafts.sources.ngram_pool import NgramPool

        seeds = self.ngram if self.seeded else 0
        return JacobiWindow(self.window, self.ngram, ends), NgramPool(self.key_max, self.per_key, self.guesses, seeds)


@dataclass(frozen=True)
class Lookahead(LookaheadSettings):
    """Guess with scouts alone (Lookahead; with a view, FAFO)."""

    def drafter(self, ends: Collection[int] = (), pair: ModelPair | None = None) -> TreeDrafter:
        """A drafter that knows no text yet."""
        from kvcli.drafts.tree.tree_drafter import TreeDrafter

        window, pool = self.scouting(ends)
        return TreeDrafter(self, [pool], scouting=(window, pool), view=self.glance())
