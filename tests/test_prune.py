"""Prompts read layer by layer, in parts or all at once, and tokens that stay behind on the way (LazyLLM)."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from kvcli.drafts.off import Off
from kvcli.engine.engine import Engine, drive, events, run, together
from kvcli.engine.feed import Feed
from kvcli.engine.lm import LM
from kvcli.engine.rows import Rows
from kvcli.engine.sample import Sampler
from kvcli.engine.session import Session, commit
from kvcli.errors import BadModel
from kvcli.kv.dense import Dense
from kvcli.kv.ladder import Ladder, Rung
from kvcli.prune.lazy import Lazy
from tests import families
from tests.policies import Recent

torch.set_num_threads(1)
N = 45


@cache
def lm(name: str, dtype: torch.dtype = torch.float64) -> LM:
    return LM.of(families.build(name, dtype))


def store(model: LM, n: int) -> Dense:
    kv, rows = Dense(model.shapes, model.dtype), Rows.chain(families.prompt(n, seed=7), 0)
    if n:
        commit(kv, rows, *run([Feed(model, rows, kv)]), range(n))
    return kv


@pytest.mark.parametrize("past", [0, 20])
@pytest.mark.parametrize("part", [1, 7, 44])
@pytest.mark.parametrize("name", [n for n in families.FAMILIES if not any(s.shares is not None for s in lm(n).shapes)])
def test_layer_by_layer_is_chunk_by_chunk(name: str, part: int, past: int) -> None:
    model, ids = lm(name), families.prompt(N)
    whole, parts = store(model, past), store(model, past)
    rows = Rows.chain(ids, past)
    (made,) = run([Feed(model, rows, whole, hear=[3, 40])])
    commit(whole, rows, made, range(N))
    (same,) = run([Feed(model, rows, parts, hear=[3, 40], is_prompt=True, part=part)])
    assert not same.fresh, "all is stored"
    for layer in range(model.n_layers):
        a, b = whole.slots(layer), parts.slots(layer)
        assert torch.equal(a.pos, b.pos)
        torch.testing.assert_close(a.k, b.k, rtol=0, atol=1e-12)
        torch.testing.assert_close(a.v, b.v, rtol=0, atol=1e-12)
        torch.testing.assert_close(made.queries[layer], same.queries[layer], rtol=0, atol=1e-12)


def test_the_same_to_the_bit_where_rows_are_independent() -> None:
    model = LM.of(families.build("llama", torch.bfloat16))
    model.lay_out()
    assert model.is_row_invariant
    whole, parts, rows = store(model, 0), store(model, 0), Rows.chain(families.prompt(N), 0)
    commit(whole, rows, *run([Feed(model, rows, whole)]), range(N))
    run([Feed(model, rows, parts, is_prompt=True, part=16)])
    for layer in range(model.n_layers):
        assert torch.equal(whole.slots(layer).k, parts.slots(layer).k)
        assert torch.equal(whole.slots(layer).v, parts.slots(layer).v)


def session(model: LM, pruning: Lazy | None, chunk: int = 16, **more: object) -> Session:
    return Session(model, Dense(model.shapes, model.dtype), Off(), Sampler(), chunk=chunk, pruning=pruning, **more)  # type: ignore[arg-type]


def settings(**changes: object) -> Lazy:
    usual = {"start_prune_layer": 0.4, "end_prune_layer": 0.7, "num_prune": 2, "recent": 3, "sinks": 1, "least": 8}
    return Lazy(**{**usual, **changes})  # type: ignore[arg-type]


def said(s: Session, ids: list[int], n: int = 20) -> list[int]:
    s.begin(ids, Sampler())
    while drive(s.chunk(ids)):
        pass
    list(events(s.stream(n)))
    return s.ids[len(ids) :]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen3"])
def test_with_all_kept_nothing_changes(name: str) -> None:
    idle = settings(start_keep_ratio=1.0, end_keep_ratio=1.0)
    ids = families.prompt(N)
    first = said(session(lm(name), None), ids)
    s = session(lm(name), idle)
    assert said(s, ids) == first
    turn = [*ids, *first, *families.prompt(30, seed=4)]
    assert said(s, turn) == said(session(lm(name), None), turn)


@pytest.mark.parametrize("chunk", [7, 16, 100])
def test_those_that_the_end_looks_at_go_on(chunk: int) -> None:
    """By hand: the rule of the paper over the stored keys of the layer below."""
    model, ids = lm("llama"), families.prompt(N + 1)
    lazy = settings(start_keep_ratio=0.6, end_keep_ratio=0.3)
    s = session(model, lazy, chunk)
    assert drive(s.chunk(ids))
    live = list(range(N))
    full = session(model, None, 100)
    drive(full.chunk(ids))
    cuts = lazy.cuts(model)
    for layer in range(model.n_layers):
        if layer in cuts:
            (made,) = run([Feed(model, Rows.chain(ids[:N], 0), Dense(model.shapes, model.dtype), hear=[N - 1])])
            if layer == min(cuts):  # below the first cut the pruned pass is the plain one
                q, k = made.queries[layer - 1][:, 0], full.kv.slots(layer - 1).k
                group = q.shape[0] // k.shape[0]
                scores = (
                    torch.stack([q[h] @ k[h // group].T for h in range(q.shape[0])]) * model.sights[layer - 1].scale
                )
                mass = scores.softmax(-1).mean(0)
                best = mass.argsort(descending=True, stable=True)[: math.ceil(cuts[layer] * N)].tolist()
                live = sorted({*best, 0, N - 3, N - 2, N - 1})
                assert s.kv.slots(layer).pos[0].tolist() == live
        held = s.kv.slots(layer).pos
        assert bool((held == held[:1]).all())
        assert set(held[0].tolist()) <= set(live)
        live = held[0].tolist()
    assert len(live) < N / 2 + 4


def test_a_bound_on_what_is_lost_keeps_more() -> None:
    ids = families.prompt(N + 1)
    few, many = (
        session(lm("llama"), settings(end_keep_ratio=0.1)),
        session(lm("llama"), settings(end_keep_ratio=0.1, mass=0.95)),
    )
    for s in (few, many):
        drive(s.chunk(ids))
    last = lm("llama").n_layers - 1
    assert few.kv.n_slots(last) < many.kv.n_slots(last) <= N


def test_short_prompts_and_later_questions_are_read_whole() -> None:
    model = lm("llama")
    s = session(model, settings(least=40))
    said(s, families.prompt(N), 5)
    assert s.lost == {"forgotten"}
    missing = s.committed - s.kv.n_slots(model.n_layers - 1)
    assert missing > 0
    turn = [*s.ids, *families.prompt(9, seed=8)]
    assert said(s, turn, 1)
    assert s.committed - s.kv.n_slots(model.n_layers - 1) == missing
    assert said(session(model, settings(least=99)), families.prompt(N)) == said(
        session(model, None), families.prompt(N)
    )


def test_going_back_reads_again() -> None:
    s = session(lm("llama"), settings())
    ids = families.prompt(N)
    first = said(s, ids, 5)
    assert s.begin(ids[: N - 5], Sampler()) == 0
    assert said(s, ids, 5) == first


def test_a_policy_hears_its_rows_beside() -> None:
    s = session(lm("llama"), settings(), policy=Recent(20), every=4)
    assert len(said(s, families.prompt(N))) == 20


def test_beside_other_texts_it_reads_as_alone() -> None:
    model, ids = lm("llama"), families.prompt(N)
    alone = said(session(model, settings()), ids)
    works = [session(model, settings()), session(model, None), session(model, None)]

    def work(s: Session, ids: list[int]):  # type: ignore[no-untyped-def]
        yield from s.read(ids)
        yield from s.stream(20)

    engine = Engine()
    texts = [ids, families.prompt(12, seed=5), families.prompt(30, seed=6)]
    for s, text in zip(works, texts, strict=True):
        engine.add(work(s, text))
    while engine.round():
        pass
    assert works[0].ids[N:] == alone
    for s, text in zip(works[1:], texts[1:], strict=True):
        assert s.ids[len(text) :] == said(session(model, None), text)


def test_a_pass_that_breaks_leaves_the_past_as_it_was() -> None:
    model, ids = lm("llama"), families.prompt(N)
    s = session(model, settings(), 7)
    calls = 0
    whole = s.kv.append

    def append(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise MemoryError
        whole(*args)  # type: ignore[arg-type]

    s.kv.append = append  # type: ignore[method-assign, assignment]
    with pytest.raises(MemoryError):
        drive(s.chunk(ids))
    assert s.committed == 0
    assert not any(s.kv.n_slots(layer) for layer in range(model.n_layers))
    s.kv.append = whole  # type: ignore[method-assign]
    assert said(s, ids) == said(session(model, settings(), 7), ids)


def test_a_model_whose_layers_all_slide_is_refused() -> None:
    with pytest.raises(BadModel, match="prune"):
        settings().over(lm("mistral"), store(lm("mistral"), 0), Rows.chain([0] * 99, 0), (), 0)


def test_a_pass_that_breaks_among_others_is_made_again_as_it_was() -> None:
    model, ids = lm("llama"), families.prompt(N)
    first, second = session(model, settings(), 7), session(model, settings(), 7)
    whole, calls = second.kv.append, 0

    def append(*args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise MemoryError
        whole(*args)  # type: ignore[arg-type]

    second.kv.append = append  # type: ignore[method-assign, assignment]
    alone = said(session(model, settings(), 7), ids)
    together(*(answered(s, ids) for s in (first, second)))
    assert first.ids[N:] == second.ids[N:] == alone


def answered(s: Session, ids: list[int]):  # type: ignore[no-untyped-def]
    yield from s.read(ids)
    yield from s.stream(20)


def test_what_stayed_behind_is_missing_where_a_policy_moves_things_down() -> None:
    """Such a store forgets nothing, and still has not what it was never given."""
    model, ids = lm("llama"), families.prompt(N)
    top, below = (Dense(model.shapes, model.dtype) for _ in range(2))
    kv = Ladder(top, [Rung(below)], demotes=True)
    s = Session(model, kv, Off(), Sampler(), chunk=16, pruning=settings(), policy=Recent(20), every=4)
    said(s, ids)
    assert not kv.forgets
    assert s.lost == {"forgotten"}
    assert s.begin(ids[: N - 5], Sampler()) == 0
