"""What FastGen knows of one layer of a text: what its heads were measured to look at, and what each of them chose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcli.policies.recovery import Sets, classes

if TYPE_CHECKING:
    from kvcli.engine.policy import Moment
    from kvcli.kv.slots import Slots
    from kvcli.policies.fastgen_scores import Scores


@dataclass(slots=True)
class Layer:
    """One layer of the text."""

    sets: Sets
    value: Tensor  # [C, K] what each candidate is worth to a head
    cost: Tensor  # [C, K] tokens
    measured: int  # tokens of the text when that was so
    chosen: list[int] = field(default_factory=list)  # [K] candidates
    frequent: Tensor | None = None  # [K, S] frequent slots of this very boundary
    scores: Scores | None = None  # of frequent tokens, while answering

    def having(self, word: str, like: Tensor) -> Tensor:
        """[K, 1] bool: which heads chose a candidate with this word."""
        words = self.sets.having(word)
        return torch.tensor([words[c] for c in self.chosen], device=like.device).unsqueeze(1)

    def loose(self, s: Slots, at: Moment) -> Tensor:
        """[K, S] bool: what heads keep, frequent tokens aside."""
        always, punct = classes(s, at.kinds, self.sets)
        age = at.kinds.shape[0] - 1 - s.pos
        reach = torch.where(self.having("local", age), self.sets.local, self.sets.guard)
        mask = always | at.protected | (punct & self.having("punct", age))
        return (mask | (age < reach) | self.having("full", age)) & (s.pos >= 0)

    def fresh(self, s: Slots, at: Moment) -> Tensor:
        """[K, S] bool: what heads keep at the boundary where they were measured."""
        mask = self.loose(s, at)
        return mask if self.frequent is None else mask | (self.frequent & self.having("frequent", s.pos))
