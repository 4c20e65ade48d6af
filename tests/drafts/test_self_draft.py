"""A model drafts for itself: what it reads, and what it does to the text and its store, which is nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from kvcli.drafts.draft_models import layer_skip
from kvcli.drafts.draft_models.layer_skip import Clasp, Early, Knn, LayerSet, SavedLayerSets, Swift
from kvcli.drafts.draft_models.same_model import SelfDraftModel
from kvcli.drafts.sources.model_draft import ModelDraft
from kvcli.drafts.tree.tree_drafter import TreeDrafter
from kvcli.engine.drafting.drafter import Drafter, ModelPair
from kvcli.engine.engine import iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import install_kernels, wrap_lm
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.stats import Stats
from kvcli.kernels.native import native
from kvcli.kv.slots import KVCache
from kvcli.methods.drafts.off import Off
from kvcli.methods.drafts.self_draft import SelfDraft
from kvcli.settings.values import keys_of
from tests import families, make

NEW = 36
SAMPLERS = {
    "greedy": Sampler(),
    "drawn": Sampler(temperature=0.9, top_k=24, top_p=0.95, min_p=0.01, seed=3),
    "penalty": Sampler(temperature=0.7, top_k=24, repetition_penalty=1.3, seed=11),
}


@cache
def lm(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> LM:
    return make.model(family, dtype, **changes, kernels=True)


def drafter(model: LM, **settings: Any) -> Drafter:
    usual = {"adaptive": False, "depth": 5, "copies": False, "branches": 1}
    return SelfDraft(**{**usual, **settings}).drafter(pair=ModelPair(model, model))


def opened(
    model: LM, drafter: Drafter, sampler: Sampler = SAMPLERS["greedy"], kv: KVCache | None = None, **changes: Any
) -> GenerationSession:
    kv = kv or make.dense(model)
    return make.session(model, kv, drafter, sampler, chunk=13, **changes)


def written(session: GenerationSession, n: int = 60) -> tuple[list[int], Stats]:
    stats = Stats()
    run_to_end(session.read(families.prompt(n)))
    for step in iterate_events(session.stream(NEW)):
        stats.add_step(step)
    return session.ids, stats


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_drafts_over_everything_are_always_right(family: str, sampler: str) -> None:
    model, how = lm(family), SAMPLERS[sampler]
    got, stats = written(opened(model, drafter(model), how))
    assert got == written(opened(model, Off(), how))[0]
    assert stats.accepted_tokens == stats.draft_tokens > 0
    assert stats.passes == math.ceil(NEW / 6)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("settings", [{"view": "stream", "sinks": 2, "recent": 7}, {"view": "quest", "page": 3}])
def test_a_view_drafts_worse_and_says_the_same(family: str, settings: dict[str, Any]) -> None:
    model = lm(family, torch.bfloat16)
    if settings["view"] == "quest":
        settings = {**settings, "pages": 2, "sinks": 1, "recent": 4, "refresh": 3}
    got, stats = written(opened(model, drafter(model, **settings)))
    assert got == written(opened(model, Off()))[0]
    assert stats.draft_tokens > stats.accepted_tokens


def test_nothing_of_a_draft_is_stored() -> None:
    model = lm()
    drafting, plain = opened(model, drafter(model, view="stream", sinks=1, recent=3)), opened(model, Off())
    written(drafting)
    written(plain)
    for layer in range(model.n_layers):
        mine, its = drafting.cache.slots(layer), plain.cache.slots(layer)
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
def idle(
    dtype: torch.dtype = torch.float32, family: str = "llama", layers: Sequence[int] = (2, 3, 5, 6), **changes: Any
) -> LM:
    """Of its layers some add nothing to a row: without these drafts are always right."""
    model = families.build(family, dtype, **{"num_hidden_layers": 8, **changes})
    for layer in layers:
        for name in ("self_attn.o_proj", "mlp.down_proj"):  # of zeros no product is ours, and so little adds nothing
            model.model.layers[layer].get_submodule(name).weight.data.mul_(1e-20)
    found = wrap_lm(model)
    install_kernels(found)
    return found


@pytest.mark.parametrize("how", ["swift", "clasp", "knn", "early"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_left_out_change_no_text(how: str, dtype: torch.dtype) -> None:
    model = lm("llama", dtype, num_hidden_layers=6)
    got, stats = written(opened(model, drafter(model, skip=how, skipped=0.5)))
    assert got == written(opened(model, Off()))[0]
    assert 0 < stats.draft_tokens > stats.accepted_tokens


def test_a_dynamic_programme_finds_the_layers_that_do_nothing() -> None:
    chosen = Clasp(idle(), 4 / 6)
    of_itself = ModelDraft(SelfDraftModel(idle(), chosen), idle(), depth=5, share=0.3)
    mixer = TreeDrafter(SelfDraft(adaptive=False, branches=1), [of_itself], clock=of_itself.clock, chain=of_itself)
    got, stats = written(opened(idle(), mixer))
    assert chosen.runs == [range(2), range(4, 5), range(7, 8)]
    assert got == written(opened(idle(), Off()))[0]
    assert stats.accepted_tokens == stats.draft_tokens > 0


def test_a_search_by_chance_keeps_the_best_set() -> None:
    """Of 15 sets the one that does nothing keeps every token, so it is the last that is tried."""
    chosen = Swift(idle(), 4 / 6)
    session = opened(idle(), Off())
    run_to_end(session.read(families.prompt(60)))
    run_to_end(session.stream(60))
    chosen._began -= 1e6  # there is time
    for _ in range(200):
        run_to_end(chosen.improve(session.cache, session.cache, session.ids, len(session.ids)))
    assert chosen.runs == [range(2), range(4, 5), range(7, 8)]


@pytest.mark.parametrize("family", ["llama", "gemma3"])  # a way straight through it, and gates
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_early_exit_is_norm_and_head_behind_the_first_layers(family: str, dtype: torch.dtype) -> None:
    changes = {"num_hidden_layers": 3} if family == "gemma3" else {}
    layers = changes.get("num_hidden_layers", 8)
    model = idle(dtype, family, range(2, layers), **changes)
    assert (model.direct_forward is not None) == (family == "llama" and native() is not None)
    chosen = Early(model, 1.0)
    assert chosen.runs == [range(2), range(layers, layers)]
    assert chosen.about == f"without {layers - 2} of {layers} layers"
    got, stats = written(opened(model, drafter(model, skip="early", skipped=1.0)))
    same, whole = written(opened(model, drafter(model)))  # in bf16 some tokens are as likely as others
    assert got == same == written(opened(model, Off()))[0]
    assert (stats.accepted_tokens, stats.draft_tokens) == (whole.accepted_tokens, whole.draft_tokens)
    assert stats.accepted_tokens > 0


def test_as_many_layers_go_at_the_end_as_elsewhere() -> None:
    assert Early(idle(), 4 / 6).runs == [range(4), range(8, 8)]
    assert Early(idle(), 0.0).runs == [range(8)]


def searched(known: SavedLayerSets, prompt: list[int], drafts: int = 200) -> Knn:
    """A text that had time to search."""
    chosen = Knn(idle(), 4 / 6, known)
    session = opened(idle(), Off())
    run_to_end(session.read(prompt))
    run_to_end(session.stream(60))
    chosen._began -= 1e6
    for _ in range(drafts):
        run_to_end(chosen.improve(session.cache, session.cache, session.ids, len(session.ids)))
    return chosen


def test_a_text_begins_with_what_was_found_for_one_like_it() -> None:
    known = SavedLayerSets()
    first = searched(known, families.prompt(60))
    assert first.runs == [range(2), range(4, 5), range(7, 8)]
    assert first.about == "without 4 of 8 layers, by search: no earlier text is similar"
    second = searched(known, families.prompt(60), drafts=1)
    assert second.runs == first.runs
    assert second.about == "without 4 of 8 layers, as for an earlier text that is similar (cosine 1.00)"
    assert second._tries == first._tries, "that search had come to its end"


def test_a_search_goes_on_where_an_earlier_text_left_it() -> None:
    known = SavedLayerSets()
    tried = [searched(known, families.prompt(60), drafts=2)._tries for _ in range(3)]
    assert tried == [2, 4, 6]


def test_where_no_text_is_near_it_is_searched_and_said() -> None:
    known = SavedLayerSets()
    known.keep(LayerSet(-torch.ones(48) / 48**0.5, [range(8)], 1.0, 7))
    chosen = searched(known, families.prompt(60), drafts=2)
    assert chosen.runs != [range(8)]
    assert chosen._tries == 2
    assert chosen.about.endswith(", by search: no earlier text is similar")


def test_of_texts_those_asked_for_last_are_remembered() -> None:
    known, texts = SavedLayerSets(), [LayerSet(like, [range(8)], 0.5, 1) for like in torch.eye(SavedLayerSets.MOST + 2)]
    for text in texts[:-2]:
        known.keep(text)
    known.keep(texts[0])  # asked for once more
    for text in texts[-2:]:
        known.keep(text)
    assert [known.near(text.like)[0] is text for text in texts[:4]] == [True, False, False, True]
    assert known.near(texts[-1].like) == (texts[-1], 1.0)


def test_what_one_text_taught_belongs_to_its_model_and_the_share_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = SelfDraft(adaptive=False, copies=False, skip="knn", skipped=4 / 6)
    monkeypatch.setattr(idle(), "remembers", {})

    def name(of: SelfDraft, model: LM) -> str:
        drafting = of.drafter(pair=ModelPair(model, model))
        written(opened(model, drafting))
        report = drafting.report()
        assert report is not None
        return report.by.partition(", ")[2]

    monkeypatch.setattr(layer_skip, "_SHARE", math.inf)  # there is time
    first = "by search: no earlier text is similar)"
    again = "as for an earlier text that is similar (cosine 1.00))"
    assert name(factory, idle()) == first
    assert name(factory, idle()) == again
    assert name(factory, lm("llama", num_hidden_layers=6)) == first
    assert name(SelfDraft(adaptive=False, copies=False, skip="knn", skipped=3 / 6), idle()) == first
    assert name(SelfDraft(adaptive=False, copies=False, skip="knn", skipped=4 / 6, depth=3), idle()) == again
    assert vars(factory).keys() == keys_of(SelfDraft).keys(), "settings are settings, and shared"
