"""A model drafts for itself: what it reads, and what it does to the text and its store, which is nothing."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch

from kvcli.build import view
from kvcli.drafts.chain import Chain
from kvcli.drafts.itself import Itself
from kvcli.drafts.mixer import Mixer
from kvcli.drafts.off import Off
from kvcli.drafts.self_draft import SelfDraft
from kvcli.drafts.skipping import Clasp, Swift
from kvcli.engine.drafter import Drafter, Pair
from kvcli.engine.engine import drive, events
from kvcli.engine.lm import LM
from kvcli.engine.sample import Sampler
from kvcli.engine.session import Session
from kvcli.engine.stats import Stats
from kvcli.kv.dense import Dense
from kvcli.kv.slots import Store
from tests import families

NEW = 36
SAMPLERS = {
    "greedy": Sampler(),
    "drawn": Sampler(temperature=0.9, top_k=24, top_p=0.95, min_p=0.01, seed=3),
    "penalty": Sampler(temperature=0.7, top_k=24, repetition_penalty=1.3, seed=11),
}


@cache
def lm(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> LM:
    found = LM.of(families.build(family, dtype, **changes))
    found.lay_out()
    return found


def drafter(model: LM, **settings: Any) -> Drafter:
    usual = {"adaptive": False, "depth": 5, "copies": False, "branches": 1}
    return SelfDraft(**{**usual, **settings}).drafter(pair=Pair(model, model))


def opened(
    model: LM, drafter: Drafter, sampler: Sampler = SAMPLERS["greedy"], kv: Store | None = None, **changes: Any
) -> Session:
    kv = kv or Dense(model.shapes, model.dtype)
    return Session(model, kv, drafter, sampler, view=view(model, kv, drafter), chunk=13, **changes)


def written(session: Session, n: int = 60) -> tuple[list[int], Stats]:
    stats = Stats()
    drive(session.read(families.prompt(n)))
    for step in events(session.stream(NEW)):
        stats.fold(step)
    return session.ids, stats


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_guesses_over_everything_are_always_right(family: str, sampler: str) -> None:
    model, how = lm(family), SAMPLERS[sampler]
    got, stats = written(opened(model, drafter(model), how))
    assert got == written(opened(model, Off(), how))[0]
    assert stats.accepted_tokens == stats.draft_tokens > 0
    assert stats.passes == math.ceil(NEW / 6)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("settings", [{"view": "stream", "sinks": 2, "local": 7}, {"view": "quest", "page": 3}])
def test_a_view_guesses_worse_and_says_the_same(family: str, settings: dict[str, Any]) -> None:
    model = lm(family, torch.bfloat16)
    if settings["view"] == "quest":
        settings = {**settings, "pages": 2, "sinks": 1, "local": 4, "refresh": 3}
    got, stats = written(opened(model, drafter(model, **settings)))
    assert got == written(opened(model, Off()))[0]
    assert stats.draft_tokens > stats.accepted_tokens


def test_nothing_of_a_draft_is_stored() -> None:
    model = lm()
    drafting, plain = opened(model, drafter(model, view="stream", sinks=1, local=3)), opened(model, Off())
    written(drafting)
    written(plain)
    for layer in range(model.n_layers):
        mine, its = drafting.kv.slots(layer), plain.kv.slots(layer)
        assert torch.equal(mine.pos, its.pos)
        assert torch.equal(mine.k, its.k)
        assert torch.equal(mine.v, its.v)


def test_a_draft_under_way_is_read_as_a_pass_would_read_it() -> None:
    """Where a window is shorter than the draft, too."""
    model = lm("gemma3")
    got, stats = written(opened(model, drafter(model, depth=20, max=40)), n=9)
    assert got == written(opened(model, Off()), n=9)[0]
    assert stats.accepted_tokens == stats.draft_tokens > 0


@cache
def idle(dtype: torch.dtype = torch.float32) -> LM:
    """Of its eight layers four add nothing to a row: without these guesses are always right."""
    model = families.build("llama", dtype, num_hidden_layers=8)
    for layer in (2, 3, 5, 6):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.model.layers[layer].get_submodule(name).weight.data.zero_()
    found = LM.of(model)
    found.lay_out()
    return found


@pytest.mark.parametrize("how", ["swift", "clasp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_left_out_change_no_text(how: str, dtype: torch.dtype) -> None:
    model = lm("llama", dtype, num_hidden_layers=6)
    got, stats = written(opened(model, drafter(model, skip=how, skipped=0.5)))
    assert got == written(opened(model, Off()))[0]
    assert 0 < stats.draft_tokens > stats.accepted_tokens


def test_a_dynamic_programme_finds_the_layers_that_do_nothing() -> None:
    chosen = Clasp(idle(), 4 / 6)
    of_itself = Chain(Itself(idle(), chosen), depth=5, vocab=idle().vocab, share=0.3)
    mixer = Mixer(SelfDraft(adaptive=False, branches=1), [of_itself], chain=of_itself)
    got, stats = written(opened(idle(), mixer))
    assert chosen.runs == [range(2), range(4, 5), range(7, 8)]
    assert got == written(opened(idle(), Off()))[0]
    assert stats.accepted_tokens == stats.draft_tokens > 0


def test_a_search_by_chance_keeps_the_best_set() -> None:
    """Of 15 sets the one that does nothing keeps every token, so it is the last that is tried."""
    chosen = Swift(idle(), 4 / 6)
    session = opened(idle(), Off())
    drive(session.read(families.prompt(60)))
    drive(session.stream(60))
    chosen._began -= 1e6  # there is time
    for _ in range(200):
        drive(chosen.improve(session.kv, session.kv, session.ids, len(session.ids)))
    assert chosen.runs == [range(2), range(4, 5), range(7, 8)]
