"""When a second model is asked, by a pretend clock: where that pays as far as it pays, elsewhere next to never."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcli.drafts.draft_models.draft_model import DraftModel
from kvcli.drafts.sources.model_draft import LOOK, ModelDraft
from kvcli.drafts.sources.prompt_lookup import PromptLookup
from kvcli.drafts.tree.growth import rule
from kvcli.drafts.tree.tree import DraftCandidate
from kvcli.drafts.tree.tree_drafter import TreeDrafter
from kvcli.engine.forward_request import NeededTensors, Rows
from kvcli.engine.stats import Step
from kvcli.methods.drafts.model import SeparateModelDraft
from tests.covering import pinned

PLAIN = 0.02  # seconds of a pass with one row
WRONG = 20000
COSTS: dict[str, Callable[[int], float]] = {  # rows -> plain passes
    "cheap": lambda rows: 1 + 0.02 * (rows - 1),
    "cliff": lambda rows: 1.0 if rows == 1 else 1.1 if rows <= 8 else 2.5,
    "steep": lambda rows: 1 + 0.35 * (rows - 1),
}


class Known:
    """A sibling that says the right token as often as it is told to, surer where it is right."""

    usage = list
    name, limit, needs = "known", 1 << 20, NeededTensors()

    def __init__(self, truth: Sequence[int], share: Callable[[int], float]) -> None:
        self.truth, self.share, self.max_depth = truth, share, 1 << 20
        self.text: list[int] = []
        self.n = self.asked = 0

    def start(self, ids: Sequence[int]) -> None:
        self.text = list(ids)

    def extend(self, new: Sequence[int]) -> None:
        self.text += new
        self.n = min(self.n, len(self.text) - 1)

    @property
    def n_uncovered(self) -> int:
        return len(self.text) - self.n

    @property
    def length(self) -> int:
        return len(self.text)

    def newest(self, n: int) -> list[int]:
        return self.text[-n:]

    def bind(self, cache: object) -> None:
        return

    def observe(self, step: object) -> None:
        return

    def prefill(self) -> Generator[int, None, None]:
        self.n = len(self.text) - 1
        yield from ()

    draft_ahead = DraftModel.draft_ahead

    def catch_up(self, want: int = 1, most: float = math.inf) -> Generator[int, None, list[list[float]]]:
        rows, self.n = int(min(self.n_uncovered, most)), len(self.text)
        yield rows
        return [self.said(len(self.text) - want + 1 + i) for i in range(want)]

    def continue_from(self, ids: Sequence[int], parents: Sequence[int]) -> Generator[int, None, list[list[float]]]:
        self.n += 1
        yield 1
        return [self.said(self.n)]

    def said(self, at: int) -> list[float]:
        """Of the row before position `at`."""
        rng = Random(at)
        is_right = rng.random() < self.share(at)
        lead = rng.uniform(1.0, 6.0) if is_right else rng.uniform(0.1, 3.0)
        return [self.truth[at] if is_right and at < len(self.truth) else WRONG, WRONG - 1, lead, 0.0]


class Head(Known):
    """One that reads what passes record for it, and has a pass more to make where that is missing."""

    needs = NeededTensors((2,))

    def __init__(self, truth: Sequence[int], share: Callable[[int], float]) -> None:
        super().__init__(truth, share)
        self.heard = list[int]()  # positions, rising

    def observe(self, step: Any) -> None:
        if step.hidden is not None:
            self.heard += [step.rows.pos[row] + 1 for row in step.path]

    @property
    def n_uncovered(self) -> int:
        return max(1, self.length - self.n)

    def newest(self, n: int) -> list[int]:
        end = self.length - 1
        return self.text[-max(1, sum(at == end - i for i, at in enumerate(self.heard[::-1][:n]))) :]

    def catch_up(self, want: int = 1, most: float = math.inf) -> Generator[int, None, list[list[float]]]:
        if self.heard[-1:] != [self.length - 1]:
            assert want == 1, "no trial pass computes hidden states again"
            yield 32
        assert want <= max(1, len(self.heard))
        self.heard = self.heard[-LOOK:]
        rows, self.n, self.heard = max(1, len(self.heard)), self.length, []
        yield rows
        return [self.said(self.length - want + 1 + i) for i in range(want)]


@dataclass
class Run:
    """Decodes a text whose tokens are its positions, and keeps the books."""

    each: float  # plain passes that one of the second model takes
    share: Callable[[int], float]
    cost: Callable[[int], float] = COSTS["cheap"]
    settings: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0
    rows: list[int] = field(default_factory=list)  # verified, by pass
    passes: list[int] = field(default_factory=list)  # of the second model, by pass
    records: float | None = None  # plain passes that recording takes in a pass; None = a model that needs nothing

    def __post_init__(self) -> None:
        self.target: Any = SimpleNamespace(vocab=30000, clock=lambda: self.now)
        self.truth = list(range(19000))
        config = SeparateModelDraft(**self.settings, copies=False)
        self.known = (Known if self.records is None else Head)(self.truth, self.share)
        own = ModelDraft(self.known, self.target, depth=config.depth, share=self.each)  # type: ignore[arg-type]
        self.drafter = TreeDrafter(config, [own], clock=own.clock, chain=own, stop=rule(config.stop, config.risk))
        self.at = 100
        list(self.drafter.start(self.truth[: self.at]) or ())  # type: ignore[call-overload]

    def run(self, passes: int) -> Run:
        for _ in range(passes):
            self.step()
        return self

    def step(self) -> None:
        began, asked = self.now, 0
        found = self.drafter.propose(self.truth[: self.at], 99)
        if isinstance(found, Generator):
            try:
                while True:
                    rows: Any = next(found)
                    asked += 1
                    self.now += PLAIN * self.each * (1 + 0.05 * (rows - 1))
            except StopIteration as end:
                found = end.value
        rows = Rows.build(self.truth[self.at - 1], self.at - 1, found)
        new = [self.truth[self.at]]
        path, node = [0], -1
        while (taken := [i for i, p in enumerate(found.parent) if p == node and found.ids[i] == new[-1]]) != []:
            node = taken[0]
            path.append(node + 1)
            new.append(self.truth[self.at + len(new)])
        self.now += PLAIN * (self.cost(rows.tree) + (self.records or 0.0 if found.needs.states else 0.0))
        hidden = torch.empty(0) if found.needs.states else None
        self.at += len(new)
        self.rows.append(rows.tree)
        self.passes.append(asked)
        self.drafter.observe(Step(rows, torch.empty(0), path, new, self.now - began, hidden=hidden))

    @property
    def gain(self) -> float:
        return (self.at - 100) * PLAIN / self.now


def fixed(each: float, share: float, cost: Callable[[int], float], depth: int) -> float:
    """Speed over plain decoding with always so many drafts, each right as often as `share`, on average."""
    return sum(share**i for i in range(depth + 1)) / (depth * each + cost(depth + 1))


RUNS = product((0.0, 0.3, 0.6, 0.8, 0.95), (0.05, 0.2, 0.5), COSTS)


@pytest.mark.parametrize(("share", "each", "cost"), pinned(RUNS, (0.8, 0.5, "cheap")))
def test_it_is_never_slower_and_nearly_as_fast_as_the_best_depth(share: float, each: float, cost: str) -> None:
    run = Run(each, lambda at: share, COSTS[cost], {"branches": 1}).run(1200)
    best = max(fixed(each, share, COSTS[cost], depth) for depth in range(9))
    assert run.gain >= 0.98
    assert run.gain >= 0.9 * best


@pytest.mark.parametrize("each", [0.1, 0.3])
def test_it_comes_back_when_the_text_turns_easy(each: float) -> None:
    run = Run(each, lambda at: 0.95 if at > 1500 else 0.02).run(1400)
    assert sum(run.passes[200:]) < 0.03 * 1200
    before = len(run.rows)
    while run.at < 1500:
        run.step()
    run.run(400)  # a look comes each 250 passes at most
    assert sum(rows > 1 for rows in run.rows[before + 250 :]) > 60


@pytest.mark.parametrize("each", [0.15, 0.5])
def test_a_head_that_guesses_nothing_costs_next_to_nothing(each: float) -> None:
    run = Run(each, lambda at: 0.0, records=0.02).run(160)
    assert run.gain >= 0.98
    began, at = run.now, run.at
    run.run(2000)
    assert (run.at - at) * PLAIN / (run.now - began) >= 0.985
    assert sum(run.passes[160:]) > 0, "it is still tried from time to time"


@pytest.mark.parametrize("each", [0.1, 0.3])
def test_a_head_comes_back_when_the_text_turns_easy(each: float) -> None:
    run = Run(each, lambda at: 0.9 if at > 1500 else 0.02, records=0.01)
    while run.at < 1500:
        run.step()
    before = len(run.rows)
    run.run(1400)
    assert sum(rows > 1 for rows in run.rows[before + 900 :]) > 300
    assert Run(each, lambda at: 0.9, records=0.03).run(400).gain >= 0.9 * fixed(each, 0.9, COSTS["cheap"], 6)


@pytest.mark.parametrize("cost", ["cheap", "cliff"])
@pytest.mark.parametrize("each", [0.2, 0.5])
def test_a_short_answer_loses_one_look_where_nothing_comes_true(each: float, cost: str) -> None:
    run = Run(each, lambda at: 0.0, COSTS[cost]).run(16)
    assert sum(run.passes) <= 3
    assert run.gain >= 0.95


def test_what_a_pass_takes_is_known_before_a_dear_one_is_drafted_with() -> None:
    run = Run(1.2, lambda at: 0.9)
    run.drafter._chain._share = 0.1  # type: ignore[union-attr]  # by its weights it would pay
    run.run(300)
    assert max(run.rows) == 1
    assert sum(run.passes) <= 3


def test_a_pass_that_costs_more_than_it_can_bring_is_never_made() -> None:
    run = Run(1.1, lambda at: 0.9).run(600)
    assert max(run.rows) == 1
    assert sum(run.passes) <= 2  # looks


def test_without_adapting_it_drafts_as_deep_as_it_may() -> None:
    run = Run(2.0, lambda at: 0.5, COSTS["steep"], {"adaptive": False, "depth": 3, "branches": 1})
    run.run(50)
    assert run.passes == [4] + [3] * 49  # the very first one is timed twice
    assert run.rows == [4] * 50


def test_the_others_that_it_thought_of_are_tried_beside_its_drafts() -> None:
    run = Run(0.1, lambda at: 0.5, settings={"adaptive": False, "depth": 3, "branches": 2}).run(10)
    assert run.rows == [7] * 10


@pytest.mark.parametrize("phrase", [5, 40])
def test_where_a_copy_is_all_but_sure_it_is_not_asked(phrase: int) -> None:
    run = Run(0.2, lambda at: 0.9)
    run.truth = run.known.truth = [i % phrase for i in range(12000)]
    own = run.drafter._sources[0]
    run.drafter = TreeDrafter(SeparateModelDraft(), [PromptLookup(1, 32), own], clock=own.clock, chain=own)  # type: ignore[list-item, arg-type]
    list(run.drafter.start(run.truth[: run.at]) or ())  # type: ignore[call-overload]
    run.run(200)
    assert sum(run.passes[50:]) <= 3  # looks
    assert run.gain > 5


class Free:
    """A source that takes no pass, and names the right token as often as it says."""

    name = "free"

    def __init__(self, share: float) -> None:
        self.share, self.n = share, 0

    def start(self, ids: Sequence[int]) -> None:
        self.n = len(ids)

    def extend(self, ids: Sequence[int]) -> None:
        self.n += len(ids)

    def root(self, depth: int) -> int:
        return self.n

    def offers(self, state: int, depth: int, branches: int) -> list[DraftCandidate]:
        is_right = Random(-state).random() < self.share
        return [DraftCandidate(state if is_right else WRONG + 1, self.share, state + 1, None)]

    def safe(self, candidate: DraftCandidate) -> int:
        return 4

    def learn(self, candidate: DraftCandidate, was_right: bool) -> None:
        return

    def record(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(("free", "share"), [(0.7, 0.7), (0.7, 0.9), (0.3, 0.7), (0.78, 0.6)])
@pytest.mark.parametrize("each", [0.1, 0.3])
def test_one_tree_is_no_slower_than_what_is_best_in_it(free: float, share: float, each: float) -> None:
    """Drafts that take no pass, and a model's; where both say the same its passes would bring nothing.

    Which is better is known from the newest drafts alone, so where it is close the other one is taken for a while.
    """

    def gain(is_asked: bool, is_free: bool) -> float:
        run = Run(each, lambda at: share)
        own = run.drafter._sources[0]
        of = [*([Free(free)] if is_free else []), *([own] if is_asked else [])]
        run.drafter = TreeDrafter(SeparateModelDraft(), of, clock=own.clock, chain=own if is_asked else None)  # type: ignore[arg-type]
        list(run.drafter.start(run.truth[: run.at]) or ())  # type: ignore[call-overload]
        return run.run(800).gain

    assert gain(True, True) >= 0.87 * max(gain(True, False), gain(False, True))


def test_others_go_on_behind_what_only_the_model_named() -> None:
    run = Run(0.1, lambda at: 1.0)
    run.truth = run.known.truth = [i % 40 for i in range(2000)]
    config = SeparateModelDraft(adaptive=False, depth=2, branches=1, copies=False, sources=("stand", "token-recycling"))
    run.drafter = config.mixer(ModelDraft(run.known, run.target, depth=2, share=0.1), PromptLookup(1, 32))  # type: ignore[arg-type]
    list(run.drafter.start(run.truth[: run.at]) or ())  # type: ignore[call-overload]
    for source in run.drafter._successors:
        for at in range(40):
            source.add(run.truth[at : at + 4], [run.truth[at + 4], 7000], [-0.01, -9.0])
    run.drafter._learn_from_logits = lambda step: None  # type: ignore[method-assign]
    run.run(3)
    assert run.rows == [16] * 3
