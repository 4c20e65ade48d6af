"""FastGen's state of one layer of a sequence: the measured values of the candidates and the choice of each head."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.engine.sequence.state import END
from kvcli.kv.snapshot import SnapshotReader, State
from kvcli.methods.policies.fastgen.frequency_scores import Scores
from kvcli.methods.policies.fastgen.recovery import CandidateSets, classes

if TYPE_CHECKING:
    from kvcli.engine.policy.policy import LayerContext
    from kvcli.kv.slots import Slots
    from kvcli.methods.policies.fastgen.settings import FastGenSettings


@dataclass(slots=True)
class LayerChoice:
    """The candidates measured for one layer of a sequence, and the choice of each head."""

    sets: CandidateSets
    value: Tensor  # [C, K] value of each candidate to a head
    cost: Tensor  # [C, K] tokens kept
    measured: int  # tokens of the sequence when it was measured
    chosen: list[int] = field(default_factory=list)  # [K] candidates
    frequent: Tensor | None = None  # [K, S] frequent slots measured at the current compression point
    scores: Scores | None = None  # scores of frequent tokens, while answering

    def state(self) -> State:
        """Return the state between two compression points, when `frequent` is None."""
        sets, chosen = self.sets, torch.tensor(self.chosen)
        numbers = {"local": sets.local, "most": sets.frequent, "measured": self.measured}
        tensors = {"punct": torch.tensor(sets.punct), "value": self.value, "cost": self.cost, "chosen": chosen}
        return {**numbers, **tensors, **({"scores": self.scores.state()} if self.scores is not None else {})}

    @staticmethod
    def made(given: SnapshotReader, settings: FastGenSettings, heads: int, device: torch.device) -> LayerChoice:
        """Build the choice from `state()` of a layer with `heads` KV heads. Raises SnapshotMismatch."""
        c = len(settings.candidates)
        sets = replace(
            CandidateSets.of(settings, torch.zeros(0, dtype=torch.int8)),
            local=given.number("local", given.n + settings.guarded),
            frequent=given.number("most", given.n),
            punct=tuple(given.indices("punct", 1 + END, None).tolist()),
        )
        value, cost = given.floats("value", c, heads).to(device), given.tensor("cost", torch.int64, c, heads).to(device)
        chosen = given.indices("chosen", c, heads).tolist()
        scores = Scores.made(given.part("scores"), sets, settings, heads, device) if "scores" in given else None
        return LayerChoice(sets, value, cost, given.number("measured", given.n), chosen, scores=scores)

    def having(self, word: str, like: Tensor) -> Tensor:
        """Return, as bool [K, 1], the heads that chose a candidate with this word."""
        words = self.sets.having(word)
        return torch.tensor([words[c] for c in self.chosen], device=like.device).unsqueeze(1)

    def loose(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the slots [K, S] that heads keep, without frequent tokens."""
        always, punct = classes(s, at.kinds, self.sets)
        age = at.kinds.shape[0] - 1 - s.pos
        reach = torch.where(self.having("local", age), self.sets.local, self.sets.guard)
        mask = always | at.protected | (punct & self.having("punct", age))
        return (mask | (age < reach) | self.having("full", age)) & (s.pos >= 0)

    def fresh(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the slots [K, S] that heads keep at the compression point where they were measured."""
        mask = self.loose(s, at)
        return mask if self.frequent is None else mask | (self.frequent & self.having("frequent", s.pos))
