"""A second model drafts: what it reads, stores and forgets, and what it does to the text, which is nothing."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise, product
from random import Random
from typing import Any

import pytest
import torch

from kvcli.drafts.draft_models import separate_model
from kvcli.drafts.draft_models.separate_model import SeparateDraftModel
from kvcli.drafts.sources.model_draft import ModelDraft
from kvcli.engine import engine
from kvcli.engine.drafting.drafter import Drafter, ModelPair
from kvcli.engine.engine import generate_together, iterate_events, run_to_end
from kvcli.engine.hf.lm import LM
from kvcli.engine.loading.open_lm import wrap_lm
from kvcli.engine.sequence.sampler import Sampler
from kvcli.engine.sequence.session import GenerationSession
from kvcli.engine.stats import Stats
from kvcli.errors import BadConfig, BadModel
from kvcli.kv.recurrent_state import apart_by
from kvcli.kv.slots import Slots
from kvcli.methods.drafts.model import SeparateModelDraft
from kvcli.methods.drafts.off import Off
from kvcli.models.retokenizer import TokenMapping
from tests import families, hybrids, make, small_tokenizers
from tests.covering import marked

NEW = 48
SAMPLERS = {
    "greedy": Sampler(),
    "drawn": Sampler(temperature=0.9, top_k=24, top_p=0.95, min_p=0.01, seed=3),
    "penalty": Sampler(temperature=0.7, top_k=24, repetition_penalty=1.3, seed=11),
}


@cache
def lm(family: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any) -> LM:
    return make.model(family, dtype, **changes)


def drafter(draft: LM, **settings: Any) -> Drafter:
    return SeparateModelDraft(**{"adaptive": False, "depth": 5, "copies": False, **settings}).drafter(
        pair=ModelPair(lm(), draft)
    )


def opened(drafter: Drafter, sampler: Sampler = SAMPLERS["greedy"]) -> GenerationSession:
    return make.session(lm(), drafter=drafter, sampler=sampler, chunk=13)


def text(drafter: Drafter, sampler: Sampler = SAMPLERS["greedy"], n: int = 60) -> tuple[list[int], Stats]:
    session, stats = opened(drafter, sampler), Stats()
    run_to_end(session.read(families.prompt(n)))
    for step in iterate_events(session.stream(NEW)):
        stats.add_step(step)
    return session.ids, stats


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("prefill", ["lazy", "full"])
def test_a_model_that_drafts_for_itself_is_always_right(prefill: str, sampler: str) -> None:
    got, stats = text(drafter(lm(), working=0, branches=1, prefill=prefill), SAMPLERS[sampler])
    assert got == text(Off(), SAMPLERS[sampler])[0]
    assert stats.accepted_tokens == stats.draft_tokens > 0
    assert stats.passes == math.ceil(NEW / 6)


# ---- a model some of whose layers keep a state ----

# gated delta nets, convolutions alone, a recurrent last layer, both in each layer, latents beside states
STATEFUL = ("qwen3_5_text", "lfm2", "nemotron_h", "falcon_h1", "kimi_linear")


@cache
def hybrid(family: str, dtype: torch.dtype = torch.float32) -> LM:
    return make.model(family, dtype, id=family, kernels=True)


@pytest.mark.parametrize("settings", [{"working": 0}, {"lookup_verify": 3, "copies": True, "min_match": 1}])
@pytest.mark.parametrize("family", STATEFUL)
def test_with_states_it_drafts_what_it_would_write_alone(family: str, settings: dict[str, Any]) -> None:
    both, stats = hybrid(family), Stats()
    config = SeparateModelDraft(adaptive=False, depth=5, branches=1, **{"copies": False, **settings})
    texts = []
    for made in (config.drafter(pair=ModelPair(both, both)), Off()):
        session = make.session(both, drafter=made, sampler=SAMPLERS["drawn"], chunk=13)
        run_to_end(session.read(hybrids.prompt(43)))
        for step in iterate_events(session.stream(NEW)):
            stats.add_step(step) if not isinstance(made, Off) else None
        texts.append(session.ids)
    assert texts[0] == texts[1]
    assert stats.accepted_tokens == stats.draft_tokens > 0 or "lookup_verify" in settings  # which copies may be wrong


@pytest.mark.parametrize("working", [0, 19])
@pytest.mark.parametrize("family", STATEFUL)
def test_states_go_back_to_what_was_accepted(family: str, working: int) -> None:
    """Rounds of drafts in passes of one row and of several, of which any beginning comes true; and texts cut."""
    random, its = Random(3), hybrid(family)
    at = SeparateDraftModel(its, working, 3 if working else 0, sees=0)
    ids = hybrids.prompt(60)
    at.start(ids)
    run_to_end(at.prefill())
    for n in range(60):
        run_to_end(at.catch_up())
        guesses = [random.randrange(hybrids.VOCAB) for _ in range(random.randrange(6))]
        cuts = sorted({0, *random.choices(range(len(guesses) + 1), k=2), len(guesses)})
        for a, b in pairwise(cuts):
            run_to_end(at.continue_from(guesses[a:b], range(a - 1, b - 1)))
        if n % 3 and len(guesses) > 2:  # a further pass stands behind any of them
            run_to_end(at.continue_from([5], [random.randrange(len(guesses))]))
        right = random.randint(0, len(guesses))
        ids = [*ids, *guesses[:right], random.randrange(hybrids.VOCAB)]
        if n % 20 == 19:
            ids = [*ids[: random.randrange(40, 90)], 7]
            at.start(ids)
        else:
            at.extend(ids[-right - 1 :])
        assert at.n_uncovered >= 1
        if n % 5 == 0:
            (got,) = run_to_end(at.catch_up())
            fresh = SeparateDraftModel(its, working, 3 if working else 0, sees=0)
            fresh.start(ids)
            (want,) = run_to_end(fresh.catch_up())
            assert apart_by(at._states.now, fresh._states.now) < 1e-3 or working
            assert got == pytest.approx(want, abs=1e-3) or working  # keys that stay are others


def test_what_is_passed_over_is_not_in_its_states() -> None:
    its, ids = hybrid("qwen3_5_text"), hybrids.prompt(70)
    at, fresh = SeparateDraftModel(its, 23, 3, sees=None), SeparateDraftModel(its, 0, 0, sees=0)
    at.start(ids)
    run_to_end(at.prefill())
    fresh.start([*ids[:3], *ids[50:]])
    run_to_end(fresh.prefill())
    rec = {key for key in its.recurrent_layers.like.rec if key[0] == 0}  # of the first layer, which knows no position
    assert all(torch.allclose(at._states.now.rec[key], fresh._states.now.rec[key], atol=1e-5) for key in rec)
    assert at._states.now.at == 69


@pytest.mark.parametrize(
    ("settings", "try_"),
    [
        ({"retrieval": "every:2"}, "retrieval=off"),
        ({"positions": "contiguous"}, "positions=original"),
        ({"tree": "opt"}, "tree_width=1"),
    ],
)
def test_what_states_cannot_do_is_refused_by_name(settings: dict[str, Any], try_: str) -> None:
    its = hybrid("lfm2")
    with pytest.raises(BadModel, match="lfm2 has recurrent layers") as told:
        SeparateModelDraft(**settings).drafter(pair=ModelPair(its, its))
    assert told.value.try_ == (f"--set spec.{try_}",)
    SeparateModelDraft(**{**settings, try_.split("=")[0]: 1 if try_ == "tree_width=1" else try_.split("=")[1]}).drafter(
        pair=ModelPair(its, its)
    )


@pytest.mark.parametrize("positions", ["original", "contiguous"])
def test_what_stays_of_a_text_that_is_short_enough_is_all_of_it(positions: str) -> None:
    """With as many working tokens as the text has, drafts are those of a cache that keeps everything."""
    wide = text(drafter(lm(), working=256, branches=1, positions=positions))[1]
    assert wide.accepted_tokens == wide.draft_tokens > 0


class Reader:
    """A sibling, and the text that it was told of."""

    def __init__(
        self, working: int, sinks: int, *, sees: int | None = 0, closes: bool, dtype: torch.dtype = torch.float64
    ) -> None:
        self.lm = lm("llama", dtype)
        self.it = SeparateDraftModel(self.lm, working, sinks, sees=sees, closes=closes)
        self.ids = families.prompt(70)
        self.it.start(self.ids)

    def slots(self, layer: int = 1) -> Slots:
        return self.it._kv.slots(layer)


@pytest.mark.parametrize("closes", [False, True])
def test_after_any_accepted_length_it_stores_what_a_fresh_reading_would(closes: bool) -> None:
    """A thousand rounds: trees of drafts, of which any line comes true, or a part of it."""
    random, at = Random(5), Reader(0, 0, closes=closes)
    run_to_end(at.it.prefill())
    for n in range(1000):
        run_to_end(at.it.catch_up())
        guesses = [random.randrange(97) for _ in range(random.randrange(6))]
        parents = [random.randrange(-1, i) for i in range(len(guesses))]
        cuts = sorted({0, *random.choices(range(len(guesses) + 1), k=2), len(guesses)})
        for a, b in pairwise(cuts):
            run_to_end(at.it.continue_from(guesses[a:b], parents[a:b]))
        new, row = [random.randrange(97)], random.randint(0, len(guesses)) - 1
        while row >= 0:
            new.insert(0, guesses[row])
            row = parents[row]
        at.ids += new
        if len(at.ids) > 400:
            at.ids = at.ids[: random.randrange(40, 90)]
            at.it.start(at.ids)
        else:
            at.it.extend(new)
        assert at.it.n_uncovered >= 1
        if n % 50 == 0 or len(at.ids) < 90:
            fresh = Reader(0, 0, closes=closes)
            fresh.it.start([*at.ids, 0])
            run_to_end(fresh.it.prefill())
            run_to_end(at.it.catch_up())
            s, want = at.slots(), fresh.slots()
            assert torch.equal(s.pos, want.pos)
            assert torch.allclose(s.k, want.k, atol=1e-12)
            assert torch.allclose(s.v, want.v, atol=1e-12)


@pytest.mark.parametrize("sees", [None, 0, 31])
def test_of_a_text_the_first_tokens_and_the_newest_stay(sees: int | None) -> None:
    at = Reader(23, 3, sees=sees, closes=False)
    run_to_end(at.it.prefill())
    assert at.slots().pos[0].tolist() == [0, 1, 2, *range(50 if sees is None else 49, 69)]  # room for the last one
    for n in range(40):
        run_to_end(at.it.catch_up())
        run_to_end(at.it.continue_from([n], [-1]))
        held = at.slots().pos[0].tolist()
        assert held[:3] == [0, 1, 2]
        assert held[3:] == list(range(held[-1] - len(held) + 4, len(at.ids)))
        assert 20 <= len(held) <= 23
        at.ids += [n, 5]
        at.it.extend([n, 5])


@pytest.mark.parametrize("sees", [None, 0, 31])
def test_closed_up_it_is_the_text_without_what_went(sees: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that were turned are those of a text in which the tokens between never stood; values know no positions."""
    at = Reader(23, 3, sees=sees, closes=True)
    run_to_end(at.it.prefill())
    s = at.slots(0)  # of the first layer, where a token's key depends on nothing before it
    stays = [*at.ids[:3], *at.ids[50 if sees is None else 49 : 69]]
    fresh = Reader(0, 0, closes=True)
    fresh.it.start([*stays, 0])
    run_to_end(fresh.it.prefill())
    want = fresh.slots(0)
    assert torch.equal(s.pos, want.pos)
    assert torch.allclose(s.k, want.k, atol=1e-6)  # angles are taken in float32
    assert torch.allclose(s.v, want.v, atol=1e-12)
    monkeypatch.setattr(separate_model, "CHUNK", 5)
    for n in range(300):  # five times as long as the model was made for, were positions those of the text
        run_to_end(at.it.catch_up())
        assert int(at.slots().pos.max()) < 23
        new = [n % 97] * (19 if n % 3 else 2)
        at.ids += new
        at.it.extend(new)
    assert at.it.max_depth > 400


def test_positions_of_the_text_end_where_the_model_does() -> None:
    short = lm("llama", max_position_embeddings=80)
    got, stats = text(made := drafter(short, working=20))
    assert got == text(Off())[0]
    assert 0 < stats.drafted_passes < stats.passes
    assert (report := made.report()) is not None
    assert report.paused
    assert report.reason == "draft model model has a context limit of 80 tokens"
    closed = text(drafter(short, working=20, positions="contiguous"))[1]
    assert closed.drafted_passes >= closed.passes - 1
    session, stats = opened(drafter(short, working=20, positions="contiguous")), Stats()
    run_to_end(session.read(families.prompt(200)))  # more than the model was made for, before anything was read
    for step in iterate_events(session.stream(NEW)):
        stats.add_step(step)
    assert stats.drafted_passes >= stats.passes - 1
    with pytest.raises(BadConfig, match=r"spec.working = 100 exceeds the context limit of draft model model"):
        drafter(short, working=100, positions="contiguous")


TREES = ("opt", "best", "sequoia", "cape")
# with tokens that are drawn tests/exact has trees of every kind; the best one takes 10 s to grow through a text
SHORT = [*product(TREES, ["greedy"]), ("opt", "drawn"), ("sequoia", "penalty"), ("cape", "drawn")]


@pytest.mark.parametrize(("tree", "sampler"), marked([*product(TREES, SAMPLERS)], SHORT))
def test_trees_hold_more_of_the_text_than_a_chain_and_change_nothing_of_it(tree: str, sampler: str) -> None:
    """The model drafts for itself over a part of the KV cache, so that its first choice is often not the right one."""
    settings = {"working": 9, "sinks": 1, "max": 40, "branches": 4}
    chain = text(drafter(lm(), **settings), SAMPLERS[sampler])[1]
    got, stats = text(drafter(lm(), tree=tree, tree_width=6, **settings), SAMPLERS[sampler])
    assert got == text(Off(), SAMPLERS[sampler])[0]
    assert stats.passes <= chain.passes or tree == "sequoia"  # whose shape is not made anew in so short a text


@pytest.mark.parametrize("working", [6, 20, 70, 0])
def test_a_look_is_at_no_more_than_stays(working: int) -> None:
    chain = ModelDraft(SeparateDraftModel(lm(), working, 4 if working else 0), lm(), depth=4, share=0.1)
    chain.start(families.prompt(90))
    run_to_end(chain._take_a_look(0.0))
    assert chain.draft_model.n_uncovered == 0
    assert chain.mean != ModelDraft(chain.draft_model, lm(), depth=4, share=0.1).mean


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", ["constant", "fewer words", "numbers that are none"])
def test_whatever_a_model_says_the_text_stays(kind: str, sampler: str) -> None:
    bad = families.build("gemma3", torch.float32, seed=4, vocab_size=64 if kind == "fewer words" else 97)
    with torch.no_grad():
        if kind == "constant":
            bad.lm_head.weight.zero_()
            bad.lm_head.weight[7] = 1.0
        elif kind != "fewer words":
            bad.model.norm.weight.fill_(math.nan)
    got, stats = text(drafter(wrap_lm(bad), working=20, prefill="window:26"), SAMPLERS[sampler])
    assert got == text(Off(), SAMPLERS[sampler])[0]
    assert stats.drafted_passes > 0 or kind == "numbers that are none"  # of what is no number a sampler chooses none


def test_a_model_that_runs_out_of_memory_says_so_and_leaves_the_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, n = drafter(lm("qwen2")), 0

    def attend(*args: Any, **more: Any) -> Any:
        nonlocal n
        n += 1
        if n > 50:
            raise MemoryError("no room")
        return held(*args, **more)

    store = made._chain.draft_model._kv  # type: ignore[attr-defined]
    held = store.attend
    monkeypatch.setattr(store, "attend", attend)
    got, stats = text(made)
    assert got == text(Off())[0]
    assert 0 < stats.drafted_passes < stats.passes
    assert (report := made.report()) is not None
    assert report.reason == "no memory for draft model model"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.breaks
@pytest.mark.parametrize("fault", [MemoryError("no room"), RuntimeError("broken"), ZeroDivisionError("torn")])
def test_whatever_breaks_in_its_passes_leaves_the_text_alone(
    fault: Exception, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At random passes, while it reads the prompt and while it drafts; a new text starts anew."""
    made, random, n = drafter(lm("qwen2"), prefill="full"), Random(seed), 0
    at, store = random.randrange(80), made._chain.draft_model._kv  # type: ignore[attr-defined]
    held = store.attend

    def attend(*args: Any, **more: Any) -> Any:
        nonlocal n
        n += 1
        if n > at:
            raise fault
        return held(*args, **more)

    monkeypatch.setattr(store, "attend", attend)
    session = opened(made)
    run_to_end(session.read(families.prompt(60)))
    for _ in iterate_events(session.stream(NEW)):
        pass
    assert session.ids == text(Off())[0]
    assert (report := made.report()) is not None
    assert report.fault == (
        "no memory for draft model model"
        if isinstance(fault, MemoryError)
        else f"draft model model failed: {type(fault).__name__}: {fault}"
    )
    assert report.paused
    session.rewind(40)
    run_to_end(session.read(families.prompt(8, seed=4)))
    assert made.report().fault == ""  # type: ignore[union-attr]


def test_passes_of_texts_side_by_side_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, n = lm(), lm("qwen2"), dict.fromkeys(("target", "draft"), 0)
    ran = engine._run

    def counted(of: LM, feeds: Any) -> Any:
        n["target" if of is target else "draft"] += 1
        return ran(of, feeds)

    monkeypatch.setattr(engine, "_run", counted)

    def written() -> Any:
        session = opened(drafter(draft))
        yield from session.read(families.prompt(60))
        yield from session.stream(NEW)
        return session.ids

    alone = run_to_end(written())
    before = dict(n)
    both = generate_together(written(), written())
    assert [task.result() for task in both] == [alone, alone]
    assert n == {name: 2 * count for name, count in before.items()}
    assert before["draft"] > 2 * before["target"]


def test_a_copy_of_a_text_shares_the_weights_and_not_what_was_read() -> None:
    session = opened(drafter(lm("qwen2")))
    run_to_end(session.read(families.prompt(60)))
    list(iterate_events(session.stream(9)))
    other = session.fork()
    mine, its = (s.drafter._chain.draft_model for s in (session, other))  # type: ignore[attr-defined]
    assert its.lm is mine.lm
    assert its._kv is not mine._kv
    for of in (session, other):
        list(iterate_events(of.stream(9)))
    assert session.ids == other.ids


@pytest.mark.parametrize("positions", ["contiguous", "original"])
def test_what_it_keeps_and_its_drafts_have_positions_that_it_was_made_for(positions: str) -> None:
    """Where what it keeps is closed up; else positions end where the text does."""
    small, how = lm(max_position_embeddings=64), {"positions": positions, "depth": 5}
    drafter(small, working=64 - 5, **how)
    if positions == "original":
        drafter(small, working=64 - 4, **how)
        return
    with pytest.raises(BadConfig) as caught:
        drafter(small, working=64 - 4, **how)
    assert caught.value.code == "beyond_model"
    assert caught.value.lines == ("the limit is 64 tokens, 5 of them for drafts",)
    assert caught.value.try_ == ("--set spec.working=59",)


@pytest.mark.parametrize("needs", [{"retrieval": "adaptive"}, {"tree": "opt"}, {"lookup_verify": 3}], ids=str)
def test_what_needs_one_vocabulary_is_refused_where_there_are_two(needs: dict[str, Any]) -> None:
    pair = ModelPair(lm(), lm(), TokenMapping(small_tokenizers.demo(), small_tokenizers.metaspace()))
    with pytest.raises(BadConfig) as caught:
        SeparateModelDraft(**needs).drafter(pair=pair)
    assert caught.value.code == "other_tokenizer"
    assert f"--set spec.{next(iter(needs))}=" in caught.value.try_[0]


def test_it_needs_a_model() -> None:
    with pytest.raises(BadConfig, match="needs a draft model") as found:
        _ = SeparateModelDraft().second
    assert found.value.try_[0] == "--draft MODEL"
    with pytest.raises(ValueError, match="must be more than sinks"):
        SeparateModelDraft(working=4)
    with pytest.raises(ValueError, match="covers fewer tokens than working = 1024"):
        SeparateModelDraft(prefill="window:512")
    with pytest.raises(ValueError, match="working = 300 is too small"):
        SeparateModelDraft(working=300, retrieval="every:8")
    with pytest.raises(ValueError, match='not stop = "reject"'):
        SeparateModelDraft(min_gain=0.7, stop="reject")
