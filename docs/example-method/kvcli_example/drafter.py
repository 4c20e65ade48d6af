"""LastFollower (no paper) drafts the token that last followed the newest one.

It costs a dictionary entry per token of the text; what it brings was not measured.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvcli.drafts.draft_settings import DraftSettings, clock_of
from kvcli.drafts.tree.tree import AcceptanceRates, DraftCandidate
from kvcli.drafts.tree.tree_drafter import TreeDrafter
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.stats import AcceptanceByMatch


class Followers:
    """The source of drafts: token -> the token that followed it last. Its state is a token."""

    name = "example-drafter"

    def start(self, ids: Sequence[int]) -> None:
        self.rates, self.newest, self.next = AcceptanceRates([[0.3]], ["all"]), -1, dict[int, int]()
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        for token in ids:
            self.next[self.newest], self.newest = token, token

    def root(self, depth: int) -> int:
        return self.newest

    def offers(self, state: int, depth: int, branches: int) -> list[DraftCandidate]:
        token = self.next.get(state)
        return [] if token is None else [DraftCandidate(token, self.rates.chance(0, 0), token, None)]

    def safe(self, candidate: DraftCandidate) -> int:
        return 2

    def learn(self, candidate: DraftCandidate, was_right: bool) -> None:
        self.rates.learn(0, 0, was_right)

    def record(self) -> tuple[AcceptanceByMatch, ...]:
        return self.rates.record()


@dataclass(frozen=True)
class LastFollower(DraftSettings):
    """Draft the token that last followed the newest token, and so on from there."""

    def drafter(self, ends: Collection[int] = (), pair: ModelPair | None = None) -> TreeDrafter:
        return TreeDrafter(self, [Followers()], clock=clock_of(pair))
