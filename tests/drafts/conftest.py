"""A pretend engine for drafters: the text is known beforehand and passes take the time they are told to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
import torch

from kvcli.drafts.tree.tree_drafter import TreeDrafter
from kvcli.engine.forward_request import Draft, Rows
from kvcli.engine.stats import Step

PLAIN = 0.02  # seconds of a pass with one row


@dataclass
class Engine:
    """Decodes `text` after its first `prompt` tokens with the drafter, and keeps the books."""

    drafter: TreeDrafter
    text: Sequence[int]
    prompt: int
    cost: Callable[[int], float] = lambda rows: 1 + 0.02 * (rows - 1)  # plain passes
    slow: Callable[[int], float] = lambda number: 1.0  # factor on pass `number`, first passes or noise
    look_up: float = 0.005  # plain passes
    hook_output: Callable[[int], list[float]] = lambda row: []  # row of logits -> its likeliest tokens and their logits
    steps: list[Step] = field(default_factory=list)
    true_seconds: float = 0.0  # without `slow`

    def __post_init__(self) -> None:
        self.at = self.prompt
        self.looked = 0
        index = self.drafter._sources[0].index
        find = index.find

        def counted(limit: int = 16, path: Sequence[int] = ()) -> object:
            self.looked += 1
            return find(limit, path)

        index.find = counted  # type: ignore[method-assign, assignment]
        self.drafter.start(list(self.text[: self.prompt]))

    def step(self) -> Step:
        ids, looked = list(self.text[: self.at]), self.looked
        draft = self.drafter.propose(ids, room=len(self.text) - self.at - 1)
        rows = Rows.build(ids[-1], self.at - 1, draft)
        path = self._accepted(draft)
        new = list(self.text[self.at : self.at + len(path)])
        seconds = PLAIN * (self.cost(rows.tree) + self.look_up * (self.looked - looked))
        step = Step(rows, torch.empty(0), path, new, seconds * self.slow(len(self.steps)), self.hook_output)
        self.drafter.observe(step)
        self.steps.append(step)
        self.at += len(new)
        self.true_seconds += seconds
        return step

    def run(self, passes: int) -> Engine:
        for _ in range(passes):
            if self.at < len(self.text) - 1:
                self.step()
        return self

    def finish(self) -> Engine:
        """Decode to the end of the text."""
        while self.at < len(self.text) - 1:
            self.step()
        return self

    @property
    def gain(self) -> float:
        """Speed over plain decoding, by the true times."""
        return sum(len(s.new) for s in self.steps) * PLAIN / self.true_seconds

    def drafted(self, passes: slice) -> float:
        """Share of these passes that verified drafts."""
        chosen = self.steps[passes]
        return sum(s.n_drafted > 0 for s in chosen) / len(chosen)

    def _accepted(self, draft: Draft) -> list[int]:
        path, node, at = [0], -1, self.at
        while True:
            below = [i for i, p in enumerate(draft.parent) if p == node and draft.ids[i] == self.text[at]]
            if not below:
                return path
            node, at = below[0], at + 1
            path.append(node + 1)


@pytest.fixture
def engine() -> type[Engine]:
    return Engine


def random_text(n: int, alphabet: int, seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(alphabet) for _ in range(n)]


def copied_text(n: int, seed: int, slip: float = 0.05, source: int = 400) -> list[int]:
    """Passages of an earlier source, 30 to 90 tokens each, with one token in twenty replaced."""
    rng = Random(seed)
    text = random_text(source, 5000, seed)
    while len(text) < n:
        at = rng.randrange(source - 100)
        passage = text[at : at + rng.randrange(30, 90)]
        text += [rng.randrange(5000) if rng.random() < slip else t for t in passage]
    return text[:n]


@pytest.fixture
def random_ids() -> Callable[[int, int, int], list[int]]:
    return random_text


@pytest.fixture
def copied_ids() -> Callable[..., list[int]]:
    return copied_text
