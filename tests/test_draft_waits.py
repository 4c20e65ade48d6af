"""Draft passes of one round hand their tokens on by themselves: how often the host waits for the device."""

from __future__ import annotations

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

NEW, DEPTH = 30, 5
PROMPT = families.prompt(60, seed=2)
# a draft model that agrees with the target, one that does not, and the target itself over a part of its KV cache
SIDES = {"alike": ("model", 0), "unlike": ("model", 1), "self": ("self", 0)}


def opened(side: str, graphs: FakeGraphs | None, *sets: str) -> Any:
    method, seed = SIDES[side]
    target, draft = (wrap_lm(families.build("llama", torch.float64, seed=of, num_hidden_layers=3)) for of in (0, seed))
    pair = ModelPair(target, draft if method == "model" else target)
    for lm in (target, draft):
        lm.is_on_accelerator = graphs is not None
        lm.remembers = {CapturedPasses: CapturedPasses(graphs)} if graphs is not None else {}
    its = [f"spec.method={method}", f"spec.depth={DEPTH}", "spec.adaptive=false", "spec.copies=false"]
    its += ["spec.model=draft"] if method == "model" else ["spec.view=stream", "spec.recent=16"]
    return assemble.session(target, load_profile("exact", sets=[*its, *sets]), pair=pair)


def written(session: Any, graphs: FakeGraphs | None = None) -> tuple[list[list[int]], list[int]]:
    """Return the ids of each step, and its waits."""
    run_to_end(session.read(PROMPT))
    steps, waits = [], []
    while (left := len(PROMPT) + NEW - len(session.ids)) > 0:
        before = graphs.waits if graphs is not None else 0
        steps.append([*run_to_end(session.step((), left)).rows.ids])
        waits.append((graphs.waits if graphs is not None else 0) - before)
    return steps, waits


@pytest.mark.parametrize("side", SIDES)
def test_a_round_of_a_fixed_draft_waits_for_the_draft_and_for_the_target(side: str) -> None:
    graphs = FakeGraphs()
    steps, waits = written(opened(side, graphs), graphs)
    assert steps == written(opened(side, None))[0], "the drafts of single operations"
    assert max(map(len, steps)) > DEPTH
    assert max(waits[1:]) == 2, "the first round times its passes"


def test_where_a_draft_ends_by_what_its_passes_find_each_pass_is_waited_for() -> None:
    graphs = FakeGraphs()
    _, waits = written(opened("alike", graphs, "spec.min_gain=0.1"), graphs)
    assert max(waits[1:]) == 1 + DEPTH
