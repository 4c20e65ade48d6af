"""What drafting owes the text beside the table of exactness: nothing of a refused draft is left anywhere.

docs/design/exactness.md lists all obligations and the tests that hold them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kvcli.drafts.sources.prompt_lookup import SuffixIndex
from kvcli.drafts.tree.tree_drafter import TreeDrafter
from kvcli.engine.drafting.drafter import ModelPair
from kvcli.engine.engine import run_to_end
from kvcli.engine.forward_request import Draft
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.methods.drafts.mix import Mix
from kvcli.methods.drafts.model import SeparateModelDraft
from kvcli.methods.drafts.off import Off
from tests import drafters
from tests.exact.table import DRAFTERS, STOP, lm, opened, plain, prompt, sibling, written

REFUSED = ["wrong", "bush", "moody", "endspam", "mix", "model", "blind", "eagle3-random"]  # among whose drafts many are


@pytest.mark.parametrize("drafter", REFUSED)
@pytest.mark.parametrize("policy", ["all", "ragged", "window"])
def test_a_refused_draft_is_in_no_kv_cache_and_no_recorded_queries(policy: str, drafter: str) -> None:
    """To the bit, rows being the same alone and in company."""
    want = opened("dense", policy, "sampled", "fp32", Off())
    run_to_end(written(want))
    got = opened("dense", policy, "sampled", "fp32", DRAFTERS[drafter](want.ids))
    run_to_end(written(got))
    assert got.ids == want.ids
    assert got.query_recorder.pos == want.query_recorder.pos
    assert bool(got.query_recorder.pos) == (policy == "ragged"), "one policy hears queries while an answer is written"
    for a, b in zip(tensors(got), tensors(want), strict=True):
        assert torch.equal(a, b)


def tensors(session: GenerationSession) -> list[torch.Tensor]:
    slots = [session.cache.slots(layer) for layer in range(session.lm.n_layers)]
    return [t for s in slots for t in (s.k, s.v, s.pos)] + session.query_recorder._q


@pytest.mark.parametrize("of", ["mix", "model"])
def test_a_refused_draft_is_in_no_index_of_the_text(of: str) -> None:
    made: TreeDrafter = (
        Mix(adaptive=False, view="stream", sinks=2, recent=9).drafter()
        if of == "mix"
        else SeparateModelDraft(adaptive=False, depth=4).drafter([STOP], ModelPair(lm("dense", "fp32"), sibling()))
    )
    session = opened("dense", "all", "sampled", "fp32", made)
    refused = 0
    run_to_end(session.read(prompt()))
    for _ in range(20):
        step = run_to_end(session.step())
        refused += step.n_drafted - step.n_accepted
        index, fresh = made._sources[0].index, SuffixIndex(1, 32)  # type: ignore[attr-defined]
        fresh.extend(session.ids)
        assert len(index) == len(session.ids)
        assert index.find() == fresh.find()
    assert refused > 20


@pytest.mark.parametrize("sampler", ["sampled", "penalty"])
def test_a_drafter_that_shakes_every_die_there_is_changes_no_draw(sampler: str) -> None:
    class Dicey(drafters.Moody):
        def propose(self, ids: Any, room: int, past: object) -> Draft:
            torch.manual_seed(len(self.steps) % 3)
            random.seed(5)
            return super().propose(ids, room, past)

    want = plain("dense", "all", sampler, "fp32")
    session = opened("dense", "all", sampler, "fp32", Dicey(want, 97, STOP))
    assert run_to_end(written(session)) == want


def test_what_was_refused_is_not_punished() -> None:
    """A penalty counts the text and the path, and never a draft beside it."""
    session = opened("dense", "all", "greedy", "fp32", Off())
    session.sampler = Sampler(repetition_penalty=1.8)
    want = run_to_end(written(session))
    session = opened("dense", "all", "greedy", "fp32", drafters.Bush(want, 97, STOP))
    session.sampler = Sampler(repetition_penalty=1.8)
    assert run_to_end(written(session)) == want != plain("dense", "all", "greedy", "fp32")
    assert set(session.history.seen([[]])[0].nonzero().flatten().tolist()) == set(want)
