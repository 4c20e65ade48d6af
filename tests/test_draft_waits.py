"""Draft passes of one round hand their tokens on by themselves: how often the host waits for the device."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from kvcli import assemble
from kvcli.engine.cuda_graphs.captured_passes import CapturedPasses
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import generate_together, run_to_end
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.settings.profile import load_profile
from tests import families
from tests.fake_graphs import FakeGraphs

NEW, DEPTH = 24, 5
PROMPT = families.prompt(60, seed=2)
# a draft model that agrees with the target; one whose second or third choice is often right, to which a number is added
# in each weight of the output layer; and the target itself over a part of its KV cache
SIDES = {"alike": ("model", 0.0), "near": ("model", 0.1), "self": ("self", 0.0)}


def models(side: str, graphs: FakeGraphs | None) -> ModelPair:
    """Return the models, on a device that records if `graphs` are given."""
    method, noise = SIDES[side]
    target, draft = (wrap_lm(families.build("llama", torch.float64, num_hidden_layers=3)) for _ in range(2))
    head = draft.model.get_output_embeddings().weight
    with torch.no_grad():
        head.add_(noise * torch.randn(head.shape, generator=torch.Generator().manual_seed(3), dtype=head.dtype))
    for lm in (target, draft) if graphs is not None else ():
        lm.is_on_accelerator, lm.remembers[CapturedPasses] = True, CapturedPasses(graphs)
    return ModelPair(target, draft if method == "model" else target)


def opened(pair: ModelPair, *sets: str) -> Any:
    of_method = ["spec.method=self", "spec.view=stream", "spec.recent=16"]
    if pair.draft is not pair.target:
        of_method = ["spec.method=model", "spec.model=draft"]
    its = [*of_method, f"spec.depth={DEPTH}", "spec.adaptive=false", "spec.copies=false", *sets]
    session = assemble.session(pair.target, load_profile("exact", sets=its), pair=pair)
    session.drafter._chain._share = 0.05  # Sequoia goes no deeper with a draft model as large as the target
    run_to_end(session.read(PROMPT))
    return session


def written(session: Any, graphs: FakeGraphs) -> tuple[list[list[tuple[int, ...]]], list[int]]:
    """Return the paths of each step's rows, and its waits."""
    steps, waits = [], []
    while (left := len(PROMPT) + NEW - len(session.ids)) > 0:
        before = graphs.waits
        rows = run_to_end(session.step((), left)).rows
        steps.append(sorted((rows.ids[0], *rows.path(row)) for row in range(rows.tree)))
        waits.append(graphs.waits - before)
    return steps, waits


# 15 draft tokens are verified at most
CHAIN, ALL, BEST = ("spec.branches=1",), ("spec.branches=3",), ("spec.branches=4",)
SEQUOIA = ("spec.tree=sequoia", "spec.max=9", "spec.tree_width=4")


@pytest.mark.parametrize(
    ("side", "sets", "most"),
    [
        *((side, sets, 1) for side, sets in product(SIDES, (CHAIN, ALL))),
        *((side, SEQUOIA, 1) for side in ("alike", "near")),
        ("near", BEST, 2),  # the host chooses the likeliest
        ("alike", (*CHAIN, "spec.copies=true"), 2),  # the host adds copies
        ("near", (*ALL, "spec.tree=opt", "spec.tree_width=2"), 1 + DEPTH),  # and what each pass runs
    ],
)
def test_a_round_waits_once_if_the_shape_of_the_draft_is_known_before(
    side: str, sets: tuple[str, ...], most: int
) -> None:
    graphs = FakeGraphs()
    steps, waits = written(opened(models(side, graphs), *sets), graphs)
    assert steps == written(opened(models(side, None), *sets), graphs)[0], "the drafts of single operations"
    assert max(map(len, steps)) > DEPTH
    assert max(waits[1:]) == most, "the first round times its passes"


def test_sequoia_waits_for_one_draft_of_each_shape_to_time_its_passes() -> None:
    graphs = FakeGraphs()
    session = opened(models("alike", graphs), *SEQUOIA)
    chain = session.drafter._chain
    for until, waits in ((5, 1), (1, 3), (1, 2), (0, 1)):  # the first timed draft is made twice; 0 = another shape
        run_to_end(session.step())
        chain._until_plan, before, timed = until, graphs.waits, len(chain._seconds)
        run_to_end(session.step())
        assert graphs.waits - before == waits
        assert (len(chain._seconds) > timed) == (waits > 1)


@pytest.mark.parametrize("sets", [CHAIN, ALL, SEQUOIA])
def test_what_is_learned_of_an_unread_draft_is_that_of_a_read_one(sets: tuple[str, ...]) -> None:
    reports = []
    for graphs in (FakeGraphs(), None):
        session = opened(models("near", graphs), *sets)
        written(session, graphs or FakeGraphs())
        reports.append((session.drafter.report(), session.drafter._chain._ranks._seen))
    assert reports[0][0].accepted_by == reports[1][0].accepted_by
    assert reports[0][0].by_source == reports[1][0].by_source
    assert reports[0][1] == reports[1][1]


@pytest.mark.parametrize("sets", [CHAIN, ALL])
def test_of_an_unread_draft_that_the_answers_end_cuts_off_the_text_is_the_same(sets: tuple[str, ...]) -> None:
    """Nobody reads that a draft goes on behind the end of an answer; verification ends there."""
    plain, graphs = opened(models("alike", None), *sets), FakeGraphs()
    written(plain, graphs)
    text = plain.ids[len(PROMPT) :]
    ends = next(token for i, token in enumerate(text) if i > DEPTH and token not in text[:i])
    session = opened(models("alike", graphs), *sets)
    session.drafter._chain._ends = frozenset({ends})
    run_to_end(session.stream(NEW, {ends}))
    assert session.ids[len(PROMPT) :] == text[: text.index(ends) + 1]
    assert session.committed == len(session.ids) - 1


@pytest.mark.parametrize("depth", [1, 2])
def test_of_passes_that_are_not_captured_the_host_reads_the_draft(depth: int) -> None:
    graphs, sets = FakeGraphs(), (*ALL, f"spec.depth={depth}")
    pair = models("near", graphs)
    del pair.draft.remembers[CapturedPasses]
    steps, _ = written(opened(pair, *sets), graphs)
    assert steps == written(opened(models("near", None), *sets), graphs)[0]
    assert max(map(len, steps)) == 1 + 3 * depth


def test_where_a_draft_ends_by_what_its_passes_find_each_pass_is_waited_for() -> None:
    graphs = FakeGraphs()
    _, waits = written(opened(models("alike", graphs), "spec.min_gain=0.1"), graphs)
    assert max(waits[1:]) == 1 + DEPTH


@pytest.mark.parametrize("sets", [CHAIN, ALL])
def test_fixed_drafts_of_two_texts_share_their_passes(sets: tuple[str, ...]) -> None:
    graphs, pair = FakeGraphs(), models("near", None)
    alone = opened(pair)
    written(alone, graphs)
    pair = models("near", graphs)
    texts = [opened(pair, *sets), opened(pair, *sets)]
    tasks = generate_together(*(text.stream(NEW) for text in texts))
    assert all(task.error is None for task in tasks)
    assert [text.ids[: len(PROMPT) + NEW] for text in texts] == [alone.ids[: len(PROMPT) + NEW]] * 2
    assert not pair.draft.remembers[CapturedPasses].eager


def test_self_drafting_offers_as_many_alternatives_as_the_profile_asks_for() -> None:
    step = run_to_end(opened(models("self", None), "spec.branches=5").step())
    assert len(step.rows.children()[0]) == 5
