"""Rules by which a second model has drafted enough: what they learn, and that none makes a text slower to write."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvcli.drafts.tree.growth import Disco, Reject, StopRule
from kvcli.methods.drafts.model import SeparateModelDraft
from tests.drafts.test_model_draft import COSTS, Run


@pytest.mark.parametrize("cost", ["cheap", "steep"])
@pytest.mark.parametrize("each", [0.05, 0.5])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("stop", ["reject", "disco"])
def test_no_rule_is_slower_than_plain_decoding(stop: str, share: float, each: float, cost: str) -> None:
    run = Run(each, lambda at: share, COSTS[cost], {"branches": 1, "stop": stop}).run(2000)
    assert run.gain >= 0.98


def test_the_bound_is_on_all_drafts_or_on_the_newest():
    chances = [0.8, 0.5, 0.25]  # the newest by itself 0.5
    assert not Reject(0.7).goes_on(chances)
    assert Reject(0.8).goes_on(chances)
    assert Disco(0.7).goes_on(chances)
    assert not Disco(0.4).goes_on(chances)


def test_the_classifier_finds_out_at_which_depth_drafts_fail():
    disco = Disco(0.5)
    for _ in range(400):
        disco.learn([0.8], True)
        disco.learn([0.8, 0.64], True)
        disco.learn([0.8, 0.64, 0.51], False)
    assert disco.goes_on([0.8, 0.64])
    assert not disco.goes_on([0.8, 0.64, 0.51])


def test_nothing_behind_a_rejection_teaches() -> None:
    heard: list[tuple[int, bool]] = []

    class NeededTensors(Disco):
        def learn(self, chances: object, was_right: bool) -> None:
            heard.append((len(chances), was_right))  # type: ignore[arg-type]

    run = Run(0.05, lambda at: 0.8, settings={"branches": 1, "stop": "disco"})
    stop: StopRule = NeededTensors(0.9)
    run.drafter._stop = stop
    run.run(100)
    assert {depth for depth, _ in heard} > {1, 2, 3}
    for (before, was_right), (depth, _) in pairwise(heard):
        assert depth == (before + 1 if was_right and depth > 1 else 1)


def test_a_rule_needs_a_clock():
    with pytest.raises(ValueError, match="needs adaptive = true"):
        SeparateModelDraft(stop="disco", adaptive=False)
