"""What a mix is planned to take follows from the sources that it has."""

from __future__ import annotations

import pytest

from kvcli.drafts import draft_settings
from kvcli.drafts.sources import logit_recycling
from kvcli.kv.footprint import NO_SIZES
from kvcli.methods.drafts.mix import Mix
from kvcli.methods.drafts.model import SeparateModelDraft
from kvcli.methods.drafts.model_draft_settings import ModelDraftSettings
from kvcli.methods.drafts.self_draft import SelfDraft


def test_without_lookahead_rows_neither_rows_nor_a_view_are_planned_for():
    with_scouts = Mix(max=7, window=4, ngram=5, view="stream", sinks=16, recent=100, refresh=8)
    assert with_scouts.rows == 1 + 7 + 15
    assert with_scouts.view_slots(1000) == 124
    assert with_scouts.view_slots(50) == 50
    without = Mix(max=7, view="stream", sources=("prompt-lookup", "token-recycling"))
    assert without.rows == 8
    assert without.view_slots(1000) == 0
    assert without.drafter().view is None


def test_what_a_model_keeps_beside_its_drafts_is_planned_for_as_in_a_mix():
    beside = SeparateModelDraft(sources=("stand", "token-recycling"))
    learned = Mix(sources=("stand", "token-recycling")).footprint(100, NO_SIZES).host
    assert learned == 400 * logit_recycling.KEY_BYTES
    assert beside.footprint(100, NO_SIZES).host == SeparateModelDraft().footprint(100, NO_SIZES).host + learned
    alone = SelfDraft(sources=("token-recycling",), copies=False).footprint(100, NO_SIZES)
    assert alone.host == 100 * logit_recycling.KEY_BYTES


def test_a_mix_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no draft source"):
        Mix(sources=())


@pytest.mark.parametrize(("each", "rests"), [(0.0, False), (1e-4, True)])
def test_logits_rest_where_listening_takes_longer_than_it_brings(
    engine, copied_ids, each: float, rests: bool, monkeypatch: pytest.MonkeyPatch
):
    """Every look at the clock takes `each` seconds, of plain passes of 0.02; the logits name what never comes."""
    now = [0.0]

    def clock() -> float:
        now[0] += each
        return now[0]

    monkeypatch.setattr(draft_settings, "perf_counter", clock)
    config = Mix(sources=("prompt-lookup", "stand", "token-recycling"))
    run = engine(config.drafter(), copied_ids(3000, 1), 400, hook_output=lambda row: [7000.0, 7001.0, 1.0, 0.0]).run(
        100
    )
    assert (run.drafter.logits_hook is None) == rests
    assert run.drafter._successors[0].rests == rests
    assert run.gain > 2


@pytest.mark.parametrize("config", [SeparateModelDraft, SelfDraft])
def test_drafting_beside_verification_is_refused_with_the_reason(config: type[ModelDraftSettings]):
    with pytest.raises(ValueError, match=r"one after the other: set overlap = false"):
        config(overlap=True)
